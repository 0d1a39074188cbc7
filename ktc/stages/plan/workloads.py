"""The needs of training and generation beside the permanent bytes, and the largest inputs that fit.

Training is one step of LoRA with Adam, once with every layer's activations kept and once with gradient checkpointing;
generation reads the prompt in one pass and then holds its cache. Every need is a monotone function of batch and length,
so the largest that fits is found by bisection. The formulas are in docs/design.md, "Memory".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import fx

from ktc.model.attention.sink_prompts import COPIES
from ktc.model.experts.streamed.stream_sizes import DEFAULT_BUFFER, ChunkBytes, chunk_bytes, result_bytes, working_bytes
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.hf.logit_tiles import step_bytes
from ktc.model.hf.private_api import attention_of
from ktc.model.hf.stock_model import vocabulary_of
from ktc.model.kernels.working_memory import ProductRows, Slots
from ktc.model.targets.node_plan import NodePlan
from ktc.model.targets.target import NodeMemory
from ktc.stages.capture import CapturedModel
from ktc.stages.capture.types import CacheLayer
from ktc.stages.plan.activations import Footprint, footprint
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import budget_of, device_of
from ktc.stages.plan.streamed_bytes import sent_experts
from ktc.stages.plan.tower_passes import TowerPass, tower_pass
from ktc.stages.plan.types import BatchShape, DeviceMemory, Workload

if TYPE_CHECKING:
    from ktc.model.linears.coded_weight import DecodedCopy

DEFAULT_LENGTH = 2048
TRAINING, CHECKPOINTED, GENERATION = "train", "train with gradient checkpointing", "infer"
_MOST = 1 << 20  # where the search for a batch ends, and for a length if the model names none
_LONGEST = 1 << 32  # no model names more positions in earnest
_OPAQUE = 34  # bytes saved per token and unit of width in a block that could not be captured: a usual layer's, no more

Needs = dict[str, dict[str, int]]


@dataclass(slots=True)
class _Layer:
    """The running blocks of one layer by device, and the routed experts and linear layers that run on the host."""

    device: str
    blocks: dict[str, list[Footprint]] = field(default_factory=dict[str, list[Footprint]])
    slots: Slots | None = None
    product: ProductRows | None = None
    experts_on: str = ""  # the GPU on which its experts stay

    def add(self, device: str, block: Footprint) -> None:
        self.blocks.setdefault(device, []).append(block)

    def saved(self, device: str, length: int) -> float:
        """Return the bytes per token that are saved for backward, in sequences of this length."""
        return sum(block.at(length)[0] for block in self.blocks.get(device, ()))

    def live(self, device: str, length: int) -> float:
        """Return the bytes per token at the widest point of forward."""
        return max((block.at(length)[1] for block in self.blocks.get(device, ())), default=0.0)

    def copied(self, device: str, tokens: int) -> int:
        """Return the bytes of copied keys and values at once."""
        copied = max((block.copied for block in self.blocks.get(device, ())), default=0.0)
        return round(min(COPIES, tokens * copied))


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of one block: per token, of its routed experts, and of its widest product with many rows."""

    footprint: Footprint
    slots: Slots | None = None
    product: ProductRows | None = None


@dataclass(frozen=True, slots=True)
class _Sent:
    """The largest layer of experts that a GPU multiplies: its decoded bytes, and the limits of a chunk.

    `rows` and `results` are the bytes of a token's rows in their widest form, and of its sums and results.
    """

    decoded: int
    chunk: ChunkBytes
    rows: int
    results: int

    def workspace(self, tokens: int) -> int:
        """Return the bytes of a call beside its weights."""
        spare = max(0, self.chunk.matrices - self.decoded)  # a small layer is one chunk
        return working_bytes(self.chunk, tokens * self.rows) - spare + tokens * self.results


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A linear layer in blocks on a GPU. The head of an answer multiplies one row of a sequence."""

    device: str
    copy: DecodedCopy
    is_head: bool


@dataclass(frozen=True, slots=True)
class _Model:
    """The inputs of the computation. `head` is the device of the logits; `per_hidden` the bytes of one state."""

    layers: tuple[_Layer, ...]
    cache: tuple[CacheLayer, ...]
    devices: tuple[DeviceMemory, ...]
    head: str
    vocabulary: int
    item: int
    per_hidden: int
    outside: ProductRows | None = None  # of linear layers outside the blocks
    sent: Mapping[str, _Sent] = field(default_factory=dict[str, _Sent])  # by GPU
    decoded: tuple[_Decoded, ...] = ()
    tower: tuple[str, TowerPass] | None = None  # with its device


def workloads(draft: PlanDraft, devices: tuple[DeviceMemory, ...]) -> tuple[tuple[Workload, ...], tuple[str, ...]]:
    """Return the uses of the model, and notes on the limits of their numbers. A program with LoRA has training."""
    captured, must_fit = draft.captured, draft.request.must_fit
    model = _described(draft, devices)
    limit = _positions(getattr(captured.source.config.get_text_config(), "max_position_embeddings", None))
    tokens = draft.rules.plan.get("tokens")
    usual = tokens if isinstance(tokens, int) and tokens > 1 else DEFAULT_LENGTH
    shape = BatchShape(must_fit.batch or 1, must_fit.length or min(usual, limit))
    uses: list[tuple[str, Callable[[int, int], Needs]]] = []
    if draft.lora is not None:
        uses.append((TRAINING, lambda b, n: _training(model, b, n, checkpointed=False)))
        uses.append((CHECKPOINTED, lambda b, n: _training(model, b, n, checkpointed=True)))
    uses.append((GENERATION, lambda b, n: _generation(model, b, n)))
    return tuple(_workload(name, need, devices, shape, limit) for name, need in uses), tuple(_notes(captured))


def _positions(named: object) -> int:
    """Return the longest input that the config names, or None for other values."""
    return min(named, _LONGEST) if type(named) is int and named >= 1 else _MOST


def _notes(captured: CapturedModel) -> Iterator[str]:
    yield "weights, adapter and cache are counted; activations are estimated, to a quarter or so (docs/design.md)"
    yield "the loss is that of `ktc train`, in tiles; one with all logits at once takes 16 bytes for each of them"
    yield "budgets leave a tenth of each device to CUDA or the process itself, unless the program sets them"
    if captured.cache is None:
        yield "this model's cache could not be measured and is not counted"
    if any(block.graph is None or block.recurrent for block in captured.blocks):
        yield "recurrent layers and blocks that could not be captured count as usual layers"


# The search ----------------------------------------------------------------------------------------------------------
def _workload(
    name: str, need: Callable[[int, int], Needs], devices: Sequence[DeviceMemory], shape: BatchShape, limit: int
) -> Workload:
    batch, length = shape.batch or 1, shape.length or 1
    max_length = _largest(limit, lambda n: not _shortfall(need(1, n), devices))
    max_batch = _largest(_MOST, lambda b: not _shortfall(need(b, length), devices))
    beyond = _shortfall(need(1, max_length + 1), devices)
    bound = "the model" if max_length == limit else max(beyond, key=lambda d: beyond[d])
    needs = need(batch, length)
    return Workload(name, batch, length, needs, _shortfall(needs, devices), max_length, max_batch, bound)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits, 0 if 1 does not. `fits` is monotone."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _shortfall(needs: Needs, devices: Sequence[DeviceMemory]) -> dict[str, int]:
    missing = {d.device: sum(needs[d.device].values()) - d.budget for d in devices if d.budget is not None}
    return {device: size for device, size in missing.items() if size > 0}


# What each use needs -------------------------------------------------------------------------------------------------
def _training(model: _Model, batch: int, length: int, *, checkpointed: bool) -> Needs:
    """Return the needs at the peak of a step: what forward saved, and the larger of loss and a layer's backward.

    A step has the micro-batches of `ktc train`, of this batch and length, whose losses share a run.
    """
    tokens, needs = batch * length, _resident(model, adapter=True)
    for device, of_device in needs.items():
        saved = [layer.saved(device, length) for layer in model.layers]
        inside = 2 * max((layer.live(device, length) for layer in model.layers), default=0.0)
        kept = sum(saved)
        if checkpointed:
            here = [layer for layer in model.layers if layer.device == device]
            outputs = sum(layer.experts_on == device for layer in here)  # they stay there until backward
            kept = (len(here) + outputs) * model.per_hidden
            inside += max(saved, default=0.0)
        loss = step_bytes(tokens, model.vocabulary, model.item, on_gpu=device != "cpu") if device == model.head else 0
        of_device["activations"] = round(tokens * (kept + inside))
        of_device["logits"] = max(0, round(loss - tokens * inside))  # they are gone when the first layer goes back
    experts = [layer.slots for layer in model.layers if layer.slots is not None]
    if experts:
        kept = [slots.saved for slots in experts]
        needs["cpu"]["experts"] = tokens * (max(kept) if checkpointed else sum(kept))
        needs["cpu"]["workspace"] = max(slots.backward(tokens) for slots in experts)
    return _with_tower(model, _with_products(model, needs, tokens, tokens), batch, length)


def _generation(model: _Model, batch: int, length: int) -> Needs:
    """Return the needs after a prompt of `length` tokens read at once, or a text that grew to that length."""
    tokens, needs = batch * length, _resident(model, adapter=False)
    for device, of_device in needs.items():
        live = max((layer.live(device, length) for layer in model.layers), default=0.0)
        copied = max((layer.copied(device, tokens) for layer in model.layers), default=0)
        of_device["activations"] = round(tokens * (live + 2 * model.per_hidden)) + copied
        of_device["logits"] = batch * model.vocabulary * (model.item + 4) if device == model.head else 0
        of_device["cache"] = 0
    for number, cached in enumerate(model.cache):
        layer = model.layers[min(number, len(model.layers) - 1)]
        seen = length if cached.window is None else min(length, cached.window)
        needs[layer.device]["cache"] += batch * (cached.fixed + cached.per_token * seen)
    experts = [layer.slots for layer in model.layers if layer.slots is not None]
    if experts:
        needs["cpu"]["workspace"] = max(slots.forward(tokens) for slots in experts)
    return _with_tower(model, _with_products(model, needs, tokens, batch), batch, length)


def _with_products(model: _Model, needs: Needs, tokens: int, logits: int) -> Needs:
    """Linear layers share the experts' workspace. That of experts on a GPU is not needed beside activations.

    A decoded weight is. `logits` are the rows of the head.
    """
    for device, sent in model.sent.items():
        running = needs[device].get("activations", 0)
        needs[device]["workspace"] = max(0, sent.workspace(tokens) - running)
    for one in model.decoded:
        if size := one.copy.workspace(logits if one.is_head else tokens):
            needs[one.device]["workspace"] = max(needs[one.device].get("workspace", 0), size)
    rows = [layer.product for layer in model.layers] + [model.outside]
    products = [product.workspace(tokens) for product in rows if product is not None]
    if products:
        needs["cpu"]["workspace"] = max(needs["cpu"].get("workspace", 0), *products)
    return needs


def _with_tower(model: _Model, needs: Needs, batch: int, length: int) -> Needs:
    """Add what the pass of the tower for images needs beyond the later needs of the layers."""
    if model.tower is not None:
        device, tower = model.tower
        later = sum(needs[device].get(purpose, 0) for purpose in ("activations", "logits", "workspace"))
        needs[device]["towers"] = max(0, tower.bytes(batch, length) - later)
    return needs


def _resident(model: _Model, *, adapter: bool) -> Needs:
    return {
        d.device: {"weights": d.weights, "adapter": d.adapter if adapter else 0, "streaming": d.streaming}
        for d in model.devices
    }


# The model in numbers ------------------------------------------------------------------------------------------------
def _described(draft: PlanDraft, devices: tuple[DeviceMemory, ...]) -> _Model:
    captured, placed = draft.captured, draft.devices
    hidden, item = int(captured.facts["hidden"]), captured.model.dtype.itemsize
    by_site = {site.fqn: rewrite for rewrite in draft.rewrites for site in rewrite.sites}
    nodes = draft.nodes_by_site()
    known: dict[tuple[str, str], _Block] = {}
    layers: dict[int, _Layer] = {}
    cached = {number: layer.per_token for number, layer in enumerate(captured.cache or ())}
    stay = {
        block.fqn: prefill.devices[0]
        for path, (prefill, _) in sent_experts(draft).items()
        if prefill.resident and len(prefill.devices) == 1
        for block in captured.sites
        if path.startswith(f"{block.fqn}.")
    }
    for site in captured.sites:
        rewrite = by_site.get(site.fqn)
        key = (site.block, rewrite.key if rewrite else "")
        if key not in known:
            known[key] = _block(draft, site.block, nodes.get(site.fqn, ()), hidden)
        block = known[key]
        layer = layers.setdefault(site.layer, _Layer(device_of(site.fqn.rpartition(".")[0], placed)))
        layer.add(device_of(site.fqn, placed), block.footprint)
        layer.slots = block.slots or layer.slots
        layer.experts_on = stay.get(site.fqn, layer.experts_on)
        layer.product = _widest(block.product, layer.product)
        if site.layer in cached:
            cached[site.layer] = _cached(draft, nodes.get(site.fqn, ()), cached[site.layer])
    for fqn, number in _norms_between_blocks(captured, hidden):
        layers[number].add(device_of(fqn, placed), Footprint(4.0 * hidden, 0.0))
    tower = tower_pass(captured)
    outside = (plan for plan in draft.nodes if plan.target.replaces_modules and not plan.claim.node)
    return _Model(
        layers=tuple(layers[number] for number in sorted(layers)),
        cache=tuple(replace(layer, per_token=cached[at]) for at, layer in enumerate(captured.cache or ())),
        devices=devices,
        head=device_of(captured.ends[1], placed),
        vocabulary=vocabulary_of(captured.model),
        item=item,
        per_hidden=hidden * item,
        outside=_widest(*(_memory(draft, plan).product for plan in outside)),
        sent=_sent(draft, hidden, item),
        decoded=tuple(dict.fromkeys(_decoded(draft))),
        tower=None if tower is None else (device_of(tower.fqn, placed), tower),
    )


def _sent(draft: PlanDraft, hidden: int, item: int) -> dict[str, _Sent]:
    """Return by GPU the experts that are sent there for calls of many tokens, or stay."""
    by_gpu: dict[str, _Sent] = {}
    for prefill, spec in sent_experts(draft).values():
        for device in prefill.devices:
            budget = budget_of(device, draft.rules, draft.host) or 0
            widest = max(hidden, (1 + spec.gated) * (spec.intermediate or 0))
            top_k, matrices = spec.top_k or 1, (2 + spec.gated) * hidden * (spec.intermediate or 0) * item
            decoded = -(-(spec.num_experts or 1) // len(prefill.devices)) * matrices
            chunk = chunk_bytes(budget, DEFAULT_BUFFER if prefill.resident else prefill.buffer)
            one = _Sent(decoded, chunk, top_k * widest * item, result_bytes(hidden, top_k, item))
            by_gpu[device] = max(by_gpu.get(device, one), one, key=lambda sent: sent.rows)
    return by_gpu


def _decoded(draft: PlanDraft) -> Iterator[_Decoded]:
    for plan in draft.nodes:
        copy = _memory(draft, plan).decoded if plan.device != "cpu" else None
        if copy is not None:
            yield _Decoded(plan.device, copy, is_head=plan.claim.path == draft.captured.ends[1])


def _memory(draft: PlanDraft, plan: NodePlan) -> NodeMemory:
    return plan.target.memory(plan, draft.captured_node(plan.claim), draft.lora_of(plan))


def _cached(draft: PlanDraft, nodes: Sequence[NodePlan], per_position: int) -> int:
    for plan in nodes:
        per_position = plan.target.cached(draft.captured_node(plan.claim), per_position)
    return per_position


def _block(draft: PlanDraft, key: str, nodes: Sequence[NodePlan], hidden: int) -> _Block:
    """Return the bytes of a block of which `nodes` are rewritten."""
    block, item = draft.captured.block(key), draft.captured.model.dtype.itemsize
    graph, memories = block.graph, [(plan.claim.node, _memory(draft, plan)) for plan in nodes]
    if graph is None or block.recurrent:
        usual = Footprint(_OPAQUE * hidden, 4.0 * hidden * item)
        return _Block(usual, product=_widest(*(memory.product for _, memory in memories)))
    adapters = {node: memory.lora for node, memory in memories if memory.lora}
    slots = next((memory.slots for _, memory in memories if memory.slots), None)
    eager = attention_of(draft.captured.model.config.get_text_config()) == "eager"
    in_blocks = {
        plan.claim.node
        for plan in nodes
        if not draft.trains and plan.target.reads_prompts_in_blocks(draft.captured_node(plan.claim))
    }
    running = footprint(graph, adapters, hidden, eager=eager, in_blocks=in_blocks)
    if slots is None:
        stock = sum(map(_stock_experts, _experts(graph)))
        running = replace(running, saved=running.saved + stock * item)
    return _Block(running, slots, _widest(*(memory.product for _, memory in memories)))


def _widest(*products: ProductRows | None) -> ProductRows | None:
    return max(
        (product for product in products if product is not None), key=lambda product: product.width, default=None
    )


def _experts(graph: fx.GraphModule) -> Iterator[tuple[int, int, int]]:
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
