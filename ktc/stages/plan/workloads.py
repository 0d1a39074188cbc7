"""The needs of training and generation beside the permanent bytes, and the largest inputs that fit.

Training is one step of LoRA with Adam, once with every layer's activations kept and once with gradient checkpointing;
generation reads the prompt in one pass and then holds its cache. Every need is a monotone function of batch and length,
so the largest that fits is found by bisection. The formulas are in docs/design.md, "Memory".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_by_name, nodes_of
from ktc.model.hf.stock_model import vocabulary_of
from ktc.model.kernels.kernel_spec import KernelSpec
from ktc.model.targets import CpuMoe, KtLinear, LoraLinear
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.activations import Adapter, Footprint, footprint
from ktc.stages.plan.outside import multiplies_many_rows, widest_product
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import BlockRewrite, DeviceMemory, LoraPlan, OutsideLinear, Point, Workload
from ktc.stages.plan.working_memory import ProductRows, Slots, slots_of

DEFAULT_LENGTH = 2048
TRAINING, CHECKPOINTED, GENERATION = "train", "train with gradient checkpointing", "infer"
_MOST = 1 << 20  # where the search for a batch ends, and for a length if the model names none
_LONGEST = 1 << 32  # no model names more positions in earnest
_LOSS = 12  # bytes per logit beside itself: fp32 log-probabilities, their gradient, and that of the logits
_OPAQUE = 34  # bytes saved per token and unit of width in a block that could not be captured: a usual layer's, no more

Needs = dict[str, dict[str, int]]


@dataclass(slots=True)
class _Layer:
    """Bytes per token of one layer by device, and the routed experts and linear layers that run on the host."""

    device: str
    saved: dict[str, float] = field(default_factory=dict[str, float])
    live: dict[str, float] = field(default_factory=dict[str, float])
    slots: Slots | None = None
    product: ProductRows | None = None

    def add(self, device: str, saved: float, live: float) -> None:
        self.saved[device] = self.saved.get(device, 0.0) + saved
        self.live[device] = max(self.live.get(device, 0.0), live)


@dataclass(frozen=True, slots=True)
class _Model:
    """The inputs of the computation. `head` is the device of the logits; `per_hidden` the bytes of one state."""

    captured: CapturedModel
    layers: tuple[_Layer, ...]
    devices: tuple[DeviceMemory, ...]
    head: str
    vocabulary: int
    item: int
    per_hidden: int
    outside: ProductRows | None = None  # of linear layers outside the blocks


def workloads(
    captured: CapturedModel,
    rewrites: Sequence[BlockRewrite],
    placements: Mapping[str, str],
    devices: tuple[DeviceMemory, ...],
    lora: LoraPlan | None,
    rules: RuleSet,
    host: Host,
    asked: Point,
    outside: Sequence[OutsideLinear] = (),
) -> tuple[tuple[Workload, ...], tuple[str, ...]]:
    """Return the uses of the model, and notes on the limits of their numbers. A program with LoRA has training."""
    model = _described(captured, rewrites, placements, devices, lora, host, outside)
    limit = _positions(getattr(captured.source.config.get_text_config(), "max_position_embeddings", None))
    tokens = rules.plan.get("tokens")
    usual = tokens if isinstance(tokens, int) and tokens > 1 else DEFAULT_LENGTH
    point = Point(asked.batch or 1, asked.length or min(usual, limit))
    uses: list[tuple[str, Callable[[int, int], Needs]]] = []
    if lora is not None:
        uses.append((TRAINING, lambda b, n: _training(model, b, n, checkpointed=False)))
        uses.append((CHECKPOINTED, lambda b, n: _training(model, b, n, checkpointed=True)))
    uses.append((GENERATION, lambda b, n: _generation(model, b, n)))
    return tuple(_workload(name, need, devices, point, limit) for name, need in uses), tuple(_notes(captured))


def _positions(named: object) -> int:
    """Return the longest input that the config names, or None for other values."""
    return min(named, _LONGEST) if type(named) is int and named >= 1 else _MOST


def _notes(captured: CapturedModel) -> Iterator[str]:
    yield "weights, adapter and cache are counted; activations are estimated, to a quarter or so (docs/design.md)"
    yield "budgets leave a tenth of each device to CUDA or the process itself, unless the program sets them"
    if captured.cache is None:
        yield "this model's cache could not be measured and is not counted"
    if any(block.graph is None for block in captured.blocks):
        yield "blocks that could not be captured count as usual layers"


# The search ----------------------------------------------------------------------------------------------------------
def _workload(
    name: str, need: Callable[[int, int], Needs], devices: Sequence[DeviceMemory], point: Point, limit: int
) -> Workload:
    batch, length = point.batch or 1, point.length or 1
    longest = _largest(limit, lambda n: not _short(need(1, n), devices))
    widest = _largest(_MOST, lambda b: not _short(need(b, length), devices))
    beyond = _short(need(1, longest + 1), devices)
    bound = "the model" if longest == limit else max(beyond, key=lambda d: beyond[d])
    needs = need(batch, length)
    return Workload(name, batch, length, needs, _short(needs, devices), longest, widest, bound)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits, 0 if 1 does not. `fits` is monotone."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _short(needs: Needs, devices: Sequence[DeviceMemory]) -> dict[str, int]:
    missing = {d.device: sum(needs[d.device].values()) - d.budget for d in devices if d.budget is not None}
    return {device: size for device, size in missing.items() if size > 0}


# What each use needs -------------------------------------------------------------------------------------------------
def _training(model: _Model, batch: int, length: int, *, checkpointed: bool) -> Needs:
    """At the deepest point of a step: all that forward saved, and the larger of the loss and one layer's backward."""
    tokens, needs = batch * length, _resident(model, adapter=True)
    for device, held in needs.items():
        saved = [layer.saved.get(device, 0.0) for layer in model.layers]
        inside = 2 * max((layer.live.get(device, 0.0) for layer in model.layers), default=0.0)
        kept = sum(saved)
        if checkpointed:
            kept = sum(layer.device == device for layer in model.layers) * model.per_hidden
            inside += max(saved, default=0.0)
        loss = model.vocabulary * (model.item + _LOSS) if device == model.head else 0
        held["activations"] = round(tokens * (kept + inside))
        held["logits"] = max(0, round(tokens * (loss - inside)))  # they are gone when the first layer goes back
    experts = [layer.slots for layer in model.layers if layer.slots is not None]
    if experts:
        kept = [slots.saved for slots in experts]
        needs["cpu"]["experts"] = tokens * (max(kept) if checkpointed else sum(kept))
        needs["cpu"]["workspace"] = max(slots.backward(tokens) for slots in experts)
    return _with_products(model, needs, tokens)


def _generation(model: _Model, batch: int, length: int) -> Needs:
    """At the end of a prompt of `length` tokens read at once, or of a text that grew to that length."""
    tokens, needs = batch * length, _resident(model, adapter=False)
    for device, held in needs.items():
        live = max((layer.live.get(device, 0.0) for layer in model.layers), default=0.0)
        held["activations"] = round(tokens * (live + 2 * model.per_hidden))
        held["logits"] = batch * model.vocabulary * (model.item + 4) if device == model.head else 0
        held["cache"] = 0
    for number, cached in enumerate(model.captured.cache or ()):
        layer = model.layers[min(number, len(model.layers) - 1)]
        seen = length if cached.window is None else min(length, cached.window)
        needs[layer.device]["cache"] += batch * (cached.fixed + cached.per_token * seen)
    experts = [layer.slots for layer in model.layers if layer.slots is not None]
    if experts:
        needs["cpu"]["workspace"] = max(slots.forward(tokens) for slots in experts)
    return _with_products(model, needs, tokens)


def _with_products(model: _Model, needs: Needs, tokens: int) -> Needs:
    """Linear layers share the experts' workspace."""
    held = [layer.product for layer in model.layers] + [model.outside]
    products = [product.workspace(tokens) for product in held if product is not None]
    if products:
        needs["cpu"]["workspace"] = max(needs["cpu"].get("workspace", 0), *products)
    return needs


def _resident(model: _Model, *, adapter: bool) -> Needs:
    return {
        d.device: {"weights": d.weights, "adapter": d.adapter if adapter else 0, "streaming": d.streaming}
        for d in model.devices
    }


# The model in numbers ------------------------------------------------------------------------------------------------
def _described(
    captured: CapturedModel,
    rewrites: Sequence[BlockRewrite],
    placements: Mapping[str, str],
    devices: tuple[DeviceMemory, ...],
    lora: LoraPlan | None,
    host: Host,
    outside: Sequence[OutsideLinear],
) -> _Model:
    hidden, item = int(captured.facts["hidden"]), captured.model.dtype.itemsize
    by_site = {site.fqn: rewrite for rewrite in rewrites for site in rewrite.sites}
    known: dict[tuple[str, str], tuple[Footprint, Slots | None, ProductRows | None]] = {}
    layers: dict[int, _Layer] = {}
    for site in captured.sites:
        rewrite = by_site.get(site.fqn)
        key = (site.block, rewrite.key if rewrite else "")
        if key not in known:
            of_block, slots = _of_block(captured, site.block, rewrite, lora, hidden, host)
            known[key] = of_block, slots, _product(captured, site.block, rewrite, host)
        of_block, slots, product = known[key]
        around = site.fqn.rpartition(".")[0]
        layer = layers.setdefault(site.layer, _Layer(device_of(around, placements)))
        layer.add(device_of(site.fqn, placements), of_block.saved, of_block.live)
        layer.slots = slots or layer.slots
        layer.product = max((each for each in (product, layer.product) if each), key=_width, default=None)
    for fqn, number in _norms_between_blocks(captured, hidden):
        layers[number].add(device_of(fqn, placements), 4 * hidden, 0.0)
    return _Model(
        captured,
        tuple(layers[number] for number in sorted(layers)),
        devices,
        device_of(captured.ends[1], placements),
        vocabulary_of(captured.model),
        item,
        hidden * item,
        widest_product(captured, outside, host.workers),
    )


def _of_block(
    captured: CapturedModel, key: str, rewrite: BlockRewrite | None, lora: LoraPlan | None, hidden: int, host: Host
) -> tuple[Footprint, Slots | None]:
    graph, item = captured.block(key).graph, captured.model.dtype.itemsize
    if graph is None:
        return Footprint(_OPAQUE * hidden, 4.0 * hidden * item), None
    adapters: dict[str, Adapter] = {}
    slots: Slots | None = None
    for action in rewrite.actions if rewrite is not None else ():
        if isinstance(action.target, LoraLinear) and rewrite is not None and lora is not None:
            path = action.at(rewrite.sites[0].fqn)
            # A GPU keeps a dropout mask as bytes, a CPU as numbers.
            mask = 0 if lora.lora_dropout == 0 else 1 if rewrite.device != "cpu" else max(4, item)
            adapters[action.node] = Adapter(lora.rank_pattern.get(path, lora.r), max(4, item), mask)
        elif isinstance(action.target, CpuMoe) and isinstance(action.kernel, KernelSpec):
            ranks = (0, 0) if lora is None or rewrite is None else _ranks(action.at(rewrite.sites[0].fqn), lora)
            keep, threads = action.target.activations == "keep", action.target.num_threads(host)
            trains = bool(action.weights.masters) or action.weights.merged
            slots = slots_of(action.kernel, keep=keep, ranks=ranks, threads=threads, weights_train=trains)
    found = footprint(graph, adapters, hidden)
    if slots is None:
        stock = sum(_stock_experts(node_attributes) for node_attributes in _experts(captured, key))
        found = Footprint(found.saved + stock * item, found.live)
    return found, slots


def _product(captured: CapturedModel, key: str, rewrite: BlockRewrite | None, host: Host) -> ProductRows | None:
    """Return the product of the block's widest linear layer that has a kernel for many rows."""
    graph = captured.block(key).graph
    if graph is None or rewrite is None:
        return None
    nodes = nodes_by_name(graph)
    widths = [
        max(int(about["in_features"]), int(about["out_features"]))
        for action in rewrite.actions
        if isinstance(action.target, KtLinear) and multiplies_many_rows(action)
        for about in [ops.attributes(nodes[action.node])]
    ]
    return ProductRows(max(widths), host.workers) if widths else None


def _width(product: ProductRows) -> int:
    return product.width


def _ranks(experts: str, lora: LoraPlan) -> tuple[int, int]:
    """Of the LoRA on gate and up, and on down; 0 without."""
    ranks = {path: lora.rank_pattern.get(path, lora.r) for path in lora.parameters}
    return max(ranks.get(f"{experts}.{name}", 0) for name in ("gate_up_proj", "up_proj")), ranks.get(
        f"{experts}.down_proj", 0
    )


def _experts(captured: CapturedModel, key: str) -> Iterator[tuple[int, int, int]]:
    graph = captured.block(key).graph
    assert graph is not None
    for node in nodes_of(graph):
        if ops.operator(node) == "experts":
            about = ops.attributes(node)
            yield int(ops.shape_of(node.args[1])[-1]), int(about["hidden"]), int(about["inter"])


def _stock_experts(sizes: tuple[int, int, int]) -> int:
    """Elements that stock experts save per token: the gathered state, gate, up, their product, and the weighted sum."""
    top_k, hidden, intermediate = sizes
    return top_k * (2 * hidden + 4 * intermediate)


def _norms_between_blocks(captured: CapturedModel, hidden: int) -> Iterator[tuple[str, int]]:
    """Yield the norms of a layer outside its blocks, with the layer's number."""
    layers = {site.fqn.rpartition(".")[0]: site.layer for site in captured.sites}
    for module in captured.modules:
        around = module.fqn.rpartition(".")[0]
        if around in layers and any(tensor.shape == (hidden,) for tensor in module.tensors):
            yield module.fqn, layers[around]
