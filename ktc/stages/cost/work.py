"""Captured model and plan -> the work of each layer, module kind by module kind.

The graphs count: multiply-adds of products and of attention, bytes that operators move, and the operators themselves.
The plan says where each is computed, and by what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ktc.foundation.formats import FORMATS, Dense
from ktc.model.attention.sink_prompts import computes_prompts
from ktc.model.experts.kept.kept_division import Division
from ktc.model.experts.layouts.panel_codes import addressed_codes_of, codes_of, cuts_of
from ktc.model.experts.streamed.stream_sizes import DEFAULT_BUFFER, Chunks, chunk_bytes
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.hf.private_api import attention_of
from ktc.model.hf.stock_model import vocabulary_of
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.packed_size import packed_bytes
from ktc.model.targets.fused_attention import FusedAttention
from ktc.model.targets.target import NodeAction, Prefill
from ktc.stages.capture import BlockSite, CapturedModel
from ktc.stages.cost.types import Core, RoutedExperts, Work
from ktc.stages.plan.activations import keeps_scores, per_token
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import BlockRewrite, Plan

# Of an RMS norm in eager PyTorch, and of the residual addition after it.
_NORM_OPERATORS, _NORM_PASSES = 7, 10
_VIEWS = {"getitem", "sym_size", "split", "slice", "view_as_complex", "view_as_real"}
_FREE = ops.TRANSPARENT - {"cast", "clone", "repeat", "contiguous", "dropout"} | _VIEWS
_GROUPED_OPERATORS = 12  # of experts as grouped products: sorting, gathering, products, activation, sums
_LORA_OPERATORS = 6  # dropout, A, B, scaling, the addition, a cast
# Of attention that keeps its scores: products, scale, mask, sinks, maximum, difference, softmax, casts. Each reads the
# scores, writes them, or both. Sinks are a column behind the scores: these are copied, and rows of odd length are read
# number by number, in 39 times the time of a pass on an H200 for prompts of 512 to 4,096 tokens.
_SCORES_OPERATORS, _SCORES_PASSES, _PASSES_WITH_SINKS = 12, 15, 39


def work_of(captured: CapturedModel, plan: Plan) -> tuple[Work, ...]:
    """Return the work of every layer in their order, then that of the head and of the optimizer."""
    return tuple(_Works(captured, plan))


class _Works:
    """The work of one model under one plan. Equal sites are counted once."""

    def __init__(self, captured: CapturedModel, plan: Plan) -> None:
        self._captured, self._plan = captured, plan
        self._devices = {placement.fqn: placement.device for placement in plan.placements}
        self._streams = {stream.fqn: stream for stream in plan.streams}
        self._rewrites = {site.fqn: rewrite for rewrite in plan.rewrites for site in rewrite.sites}
        self._known: dict[tuple[str, str, str, bool], tuple[Work, ...]] = {}
        self._item = captured.model.dtype.itemsize
        self._adapted = defaultdict[str, list[str]](list)  # the weights of experts that take LoRA
        for name in () if plan.lora is None else plan.lora.parameters:
            self._adapted[name.rpartition(".")[0]].append(name)

    def __iter__(self) -> Iterator[Work]:
        layers = set[int]()
        for site in self._captured.sites:
            if site.layer not in layers:
                layers.add(site.layer)
                yield self._norms(site)
            yield from self._of_site(site)
        yield self._head()

    def _norms(self, site: BlockSite) -> Work:
        hidden = int(self._captured.facts["hidden"])
        device = device_of(site.fqn.rpartition(".")[0], self._devices)
        moved = 2 * _NORM_PASSES * hidden * self._item
        nbytes = hidden * self._item
        operators = 2 * (_NORM_OPERATORS + 1)
        return Work("norms", site.layer, device, "", hidden=nbytes, moved=moved, operators=operators, norms=2)

    def _head(self) -> Work:
        head = self._captured.ends[1]
        hidden, vocabulary = int(self._captured.facts["hidden"]), vocabulary_of(self._captured.model)
        weights = hidden * vocabulary
        return Work(
            "lm_head", None, device_of(head, self._devices), self._dtype,
            products=weights, weights=weights * self._item, moved=vocabulary * 12, operators=8,
        )  # fmt: skip

    @property
    def _dtype(self) -> str:
        return str(self._captured.facts["dtype"])

    def _of_site(self, site: BlockSite) -> tuple[Work, ...]:
        rewrite, device = self._rewrites.get(site.fqn), device_of(site.fqn, self._devices)
        streamed = any(fqn.startswith(f"{site.fqn}.") or fqn == site.fqn for fqn in self._streams)
        key = (site.block, rewrite.key if rewrite else "", device, streamed)
        if key not in self._known:
            self._known[key] = tuple(self._block(site, rewrite, device))
        return tuple(replace(work, layer=site.layer) for work in self._known[key])

    def _block(self, site: BlockSite, rewrite: BlockRewrite | None, device: str) -> Iterator[Work]:
        block = self._captured.block(site.block)
        graph, actions = block.graph, dict[str, list[NodeAction]]()
        for action in rewrite.actions if rewrite else ():
            actions.setdefault(action.node, []).append(action)
        if graph is None or block.recurrent:
            work = self._opaque(site, device)
            for node in [] if graph is None else nodes_of(graph):
                if ops.operator(node) == "linear":
                    adapted = self._linear(work, node, actions.get(node.name, []), site)
                    work = replace(adapted, products=work.products, weights=work.weights)
            yield work
            return
        rest = Work("mlp", None, device, self._dtype, hidden=int(self._captured.facts["hidden"]) * self._item)
        for node in nodes_of(graph):
            name = ops.operator(node)
            if not _computes(node):
                continue
            if name == "experts":
                yield self._experts(node, actions.get(node.name, []), site, device)
                continue
            inside = [one for one in _inside(graph, node) if _computes(one)]
            rest = replace(
                rest,
                moved=rest.moved + sum(map(_moved, inside)),
                operators=rest.operators + len(inside),
                norms=rest.norms + (name == "rms_norm"),
            )
            if name == "linear":
                rest = self._linear(rest, node, actions.get(node.name, []), site)
            elif name == "sdpa":
                rest = self._attention(rest, node, actions.get(node.name, []), site)
        yield rest

    def _linear(self, work: Work, node: fx.Node, actions: list[NodeAction], site: BlockSite) -> Work:
        about = ops.attributes(node)
        inputs, outputs = int(about["in_features"]), int(about["out_features"])
        nbytes = inputs * outputs * self._item
        streamed = nbytes if f"{site.fqn}.{node.meta.get('fqn', '')}" in self._streams else 0
        work = replace(
            work,
            products=work.products + inputs * outputs,
            weights=work.weights + nbytes,
            streamed=work.streamed + streamed,
        )
        if any(action.target.adapts == "linear" for action in actions):
            rank = self._rank(f"{site.fqn}.{node.meta['fqn']}")
            work = replace(
                work,
                adapter=work.adapter + rank * (inputs + outputs),
                adapters=work.adapters + 2,
                operators=work.operators + _LORA_OPERATORS,
            )
        return work

    def _of_matrix(self, parameter: str) -> int:
        """Return rows and columns of one expert's matrix in a stack, which LoRA has r times."""
        return sum(self._captured.model.get_parameter(parameter).shape[-2:])

    def _rank(self, fqn: str) -> int:
        lora = self._plan.lora
        return 0 if lora is None else lora.rank_pattern.get(fqn, lora.r)

    def _attention(self, work: Work, node: fx.Node, actions: list[NodeAction], site: BlockSite) -> Work:
        query, key, value = (tuple(map(int, _sizes(source))) for source in node.all_input_nodes[:3])
        about, cache = ops.attributes(node), self._captured.cache
        cached = cache[site.layer].per_token if cache is not None and site.layer < len(cache) else 0
        cached = cached or self._item * key[0] * (key[1] + value[1])
        groups = query[0] // key[0]
        module, dtype = self._captured.model.get_submodule(site.fqn), self._captured.model.dtype
        in_blocks = self._plan.mode != "train" and bool(about["sinks"]) and computes_prompts(module, dtype)
        in_blocks = in_blocks and any(isinstance(action.target, FusedAttention) for action in actions)
        in_memory = keeps_scores(node, eager=self._is_eager) and not in_blocks
        passes = _PASSES_WITH_SINKS if about["sinks"] else _SCORES_PASSES
        core = Core(
            query[0] * (query[1] + value[1]),
            latent=value[1] < query[1],
            cached=cached,
            repeated=2 * groups * cached if groups > 1 else 0,  # a copy for each query head, written and read
            pair=passes * query[0] * self._item if in_memory else 0,
            window=max(0, int(about["window"])),
            fused=any(action.kernel is not None for action in actions),
        )
        return replace(
            work, kind="attention", core=core,
            operators=work.operators + (_SCORES_OPERATORS - 1) * (in_memory or in_blocks),
        )  # fmt: skip

    @property
    def _is_eager(self) -> bool:
        """Whether the model's own code computes attention, and not PyTorch's fused operator."""
        return attention_of(self._captured.model.config.get_text_config()) == "eager"

    def _experts(self, node: fx.Node, actions: list[NodeAction], site: BlockSite, device: str) -> Work:
        about = ops.attributes(node)
        count, top_k = int(about["num_experts"]), int(ops.shape_of(node.args[1])[-1])
        products = 3 * int(about["hidden"]) * int(about["inter"]) * top_k
        action = next((action for action in actions if isinstance(action.kernel, FusedMoeSpec)), None)
        nbytes, inner = int(about["hidden"]) * self._item, int(about["inter"]) * self._item
        work = Work("experts", None, device, self._dtype, products=products, hidden=nbytes, moved=_moved(node))
        if parameters := self._adapted.get(f"{site.fqn}.{node.meta['fqn']}".rstrip("."), ()):
            sizes = sum(self._rank(name) * self._of_matrix(name) for name in parameters)
            work = replace(work, adapter=count * sizes, adapters=2 * len(parameters))
        if action is None or not isinstance(action.kernel, FusedMoeSpec):
            weights = products // top_k * count * self._item
            experts = RoutedExperts(count, top_k, (device,), 0, True, hidden=nbytes, inner=inner)
            return replace(work, weights=weights, operators=_GROUPED_OPERATORS, experts=experts)
        spec, prefill = action.kernel, action.prefill
        experts, decoded, coded = RoutedExperts(count, top_k), False, False
        if prefill is not None:
            formats = [FORMATS[stored] for stored in spec.formats]
            decoded = prefill.resident and all(isinstance(row, Dense) for row in formats)
            coded = all(codes_of(row, spec.group_size) is not None for row in formats)
            chunks = self._chunks(spec, prefill, products // top_k * self._item, plain=decoded)
            on_gpu = any(one.device == prefill.devices[0] and one.expert_adapter for one in self._plan.devices)
            experts = RoutedExperts(
                count, top_k, prefill.devices, prefill.tokens, prefill.resident, chunks,
                adapters_on=prefill.devices[0] if on_gpu else "",
                kept=(prefill.kept or 0) / count, bus_share=None if prefill.kept is None else prefill.share,
                fixed=prefill.fixed_split, hidden=nbytes, inner=inner, parts=self._parts(spec, int(about["inter"])),
                division=Division(prefill.divided, prefill.crowded) if prefill.divided else None,
            )  # fmt: skip
        return replace(
            work,
            device="cpu",
            weight_format=spec.format_gate_up,
            weights=packed_bytes(spec),
            operators=_GROUPED_OPERATORS if decoded or (coded and experts.resident) else 1,
            experts=experts,
            packed=True,
            decoded=decoded,
            coded=coded,
            scattered=self._plan.host.numa > 1 and (prefill is not None or action.target.settings["numa"] == "none"),
        )

    @staticmethod
    def _parts(spec: FusedMoeSpec, inner: int) -> int:
        """Return into how many parts an expert of a step can be cut."""
        return cuts_of(inner, addressed_codes_of(FORMATS[spec.format_down], spec.group_size)).parts

    def _chunks(self, spec: FusedMoeSpec, prefill: Prefill, decoded: int, *, plain: bool) -> int:
        """Return the number of chunks that each device computes a layer's experts in."""
        gpus, count = self._plan.host.gpus, spec.num_experts or 1
        memory = gpus[int(prefill.devices[0].partition(":")[2] or 0)].free if gpus else 0
        buffer = 0 if prefill.resident else prefill.buffer
        chunk = chunk_bytes(memory, buffer or DEFAULT_BUFFER).matrices
        cut = Chunks(decoded, packed_bytes(spec) // count, chunk, buffer, plain)
        return len(cut.cut(range(-(-count // len(prefill.devices)))))

    def _opaque(self, site: BlockSite, device: str) -> Work:
        module = self._captured.model.get_submodule(site.fqn)
        sizes = [parameter.numel() for parameter in module.parameters()]
        return Work(
            "mlp", None, device, self._dtype, products=sum(sizes), weights=sum(sizes) * self._item,
            operators=4 * len(sizes),
        )  # fmt: skip


def _inside(graph: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return the operators that a folded node stands for, or the node itself."""
    if node.op != "call_module":
        return [node]
    folded = graph.get_submodule(str(node.target))
    assert isinstance(folded, fx.GraphModule), "a folded node is a graph"
    return nodes_of(folded)


def _computes(node: fx.Node) -> bool:
    """Whether a node is an operator with a kernel, and not a view."""
    return node.op in ("call_function", "call_module") and ops.operator(node) not in _FREE


def _moved(node: fx.Node) -> float:
    """Return the bytes per token that an operator reads and writes."""
    return per_token(node) + sum(map(per_token, node.all_input_nodes))


def _sizes(node: fx.Node) -> tuple[int, int]:
    """Return the heads of a query, a key or a value (b, h, s, d), and the width of each."""
    shape = ops.shape_of(node)
    return int(shape[1]), int(shape[3])
