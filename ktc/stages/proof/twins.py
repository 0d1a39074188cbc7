"""A twin: the model with small widths, at its whole depth and with seeded weights, and the recipe realised in it.

Input: a captured model and its rewritten blocks. Output: the stock twin and a copy of it in which the loader's own
code (`ktc.model.loading.realise`) has put every module. A site of the model is compared at the site of the same name.
Refused, with the reason: a rewrite whose block computes something else in the twin than in the model, apart from
sizes.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import fx
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, KtcError, ProofFailed
from ktc.foundation.files import temporary_folder
from ktc.foundation.host import Host
from ktc.model.compare.comparison import in_a_line
from ktc.model.compare.copies import copied
from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, nodes_of
from ktc.model.hf.foreign_errors import raised_by
from ktc.model.hf.private_api import experts_of
from ktc.model.loading.realise import realise
from ktc.model.targets.target import NodeAction, NodeWeights
from ktc.model.twin import build, shrink
from ktc.stages.capture import BlockGraph, CapturedModel, ModelSource, capture
from ktc.stages.capture.circumstances import circumstances_checked
from ktc.stages.plan import BlockRewrite
from ktc.stages.rewrite import RewrittenBlock, block_files, recipe, rewrite_block

SEED = 20260


@dataclass(frozen=True, slots=True)
class ProofTwin:
    """A small model that runs: its capture, and the stock model with seeded weights.

    `experts` is the implementation of experts that the stock model chooses itself; the model is set to `eager`.
    """

    captured: CapturedModel
    model: PreTrainedModel
    experts: str


@dataclass(frozen=True, slots=True)
class SmallRewrite:
    """A rewrite of the model carried over to the twin: its blocks there, or why that cannot be."""

    of: RewrittenBlock
    blocks: tuple[RewrittenBlock, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Key:
    """A config by its class and content."""

    kind: type
    text: str
    config: PreTrainedConfig = field(compare=False, hash=False)


def twin_of_model(captured: CapturedModel, *, second: bool = False) -> ProofTwin:
    """Return the twin of a model, with all of its layers, or a second one of other sizes.

    Raises ProofFailed (P302), InputRefused.
    """
    config = shrink(captured.source.config, whole=True, second=second)
    config.dtype = torch.float32
    return _cached_twin(_Key(type(config), json.dumps(config.to_dict(), default=str, sort_keys=True), config))


@lru_cache(maxsize=2)  # `inspect` and `compile` of one model follow each other
def _cached_twin(key: _Key) -> ProofTwin:
    with circumstances_checked():
        captured = capture(ModelSource("twin", None, key.config, None))
    return as_twin(captured)


def as_twin(captured: CapturedModel) -> ProofTwin:
    """Return a capture of twin size as its own fp32 twin. Raises ProofFailed (P302) if it cannot be built."""
    try:
        with one_thread():
            model = build(captured.source.config, SEED, torch.float32, "cpu")
    except Exception as error:  # foreign code on an unusual config raises anything
        raise ProofFailed(does_not_run(error)) from error
    stock = experts_of(model.config) or "eager"
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # attention with sinks has only eager code
        model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return ProofTwin(captured, model, stock)


def does_not_run(error: Exception) -> Diagnostic:
    """Return the diagnostic of a twin that stock transformers does not run."""
    message = f"the small twin of this model does not run in transformers: {in_a_line(error)}"
    return Diagnostic("P302", message, hint=raised_by(error))


@contextmanager
def one_thread() -> Generator[None]:
    """Run on one thread inside: on a small twin all threads would wait for the slowest at every operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Rewrites carried over ------------------------------------------------------------------------------------------------
def carried_over(captured: CapturedModel, block: RewrittenBlock, twin: ProofTwin) -> SmallRewrite:
    """Return a rewrite with the same actions on the twin's blocks at the same sites."""
    full = captured.block(block.rewrite.block)
    assert full.graph is not None, "only captured blocks are rewritten"
    by_key: dict[str, list[str]] = {}
    there = {site.fqn: site for site in twin.captured.sites}
    for site in block.rewrite.sites:
        if site.fqn not in there:
            return SmallRewrite(block, failure=f"the small twin has no block at `{site.fqn}`")
        by_key.setdefault(there[site.fqn].block, []).append(site.fqn)
    made: list[RewrittenBlock] = []
    for key, fqns in by_key.items():
        small = twin.captured.block(key)
        if failure := _mismatch(full, small):
            return SmallRewrite(block, failure=f"the block at `{fqns[0]}` {failure}")
        assert small.graph is not None
        renamed = dict(zip(significant(full.graph), significant(small.graph), strict=True))
        actions = tuple(
            replace(action, node=renamed[action.node], target=action.target.as_proven, weights=_unrounded(action))
            for action in block.rewrite.actions
        )
        sites = tuple(there[fqn] for fqn in fqns)
        # The twin is on the CPU; the transfers of the plan's placement copy values and change none.
        rewrite = BlockRewrite(f"{block.rewrite.key}_{len(made)}", key, sites, actions, "cpu")
        graph = rewrite_block(small.graph, rewrite)
        rewritten = {module.fqn for module in block.own_experts}
        modules = tuple(module for module in small.own_experts if module.fqn in rewritten)
        made.append(RewrittenBlock(rewrite, graph, small.experts if block.experts else None, modules))
    return SmallRewrite(block, tuple(made))


def _unrounded(action: NodeAction) -> NodeWeights:
    """Return what becomes of weights without a grid: rounding changes values, which proofs compare, and no computation.

    Gradients of weights that train are those of stock code.
    """
    return NodeWeights(masters=action.weights.masters)


def _mismatch(full: BlockGraph, small: BlockGraph) -> str:
    """Return in which way the twin's block is another computation, "" if the two differ in sizes alone."""
    assert full.graph is not None
    if small.graph is None:
        return f"could not be captured in the small twin: {small.opaque}"
    if signature(full.graph) != signature(small.graph):
        return "is another computation in the small twin"
    if full.experts is not None and _rounds(small.graph):
        return "rounds to half precision itself, which its code in OUT would not do in fp32"
    if [module.without_sizes() for module in full.own_experts] != [
        module.without_sizes() for module in small.own_experts
    ]:
        return "has experts of another kind in the small twin"
    return ""


def _rounds(graph: fx.GraphModule) -> bool:
    """Return whether a graph of an fp32 model names a dtype of half precision: then its author did."""
    arguments = (a for node in nodes_of(graph) for a in (*node.args, *node.kwargs.values()))
    return any(a in (torch.bfloat16, torch.float16) for a in arguments if isinstance(a, torch.dtype))


def depends_on_sizes(captured: CapturedModel, block: RewrittenBlock, twin: ProofTwin) -> bool:
    """Return whether the code of a rewritten block has other fractional numbers in the model than in the twin."""
    if block.experts is None:
        return False
    there = {site.fqn: site.block for site in twin.captured.sites}
    full = captured.block(block.rewrite.block).graph
    small = (twin.captured.block(there[site.fqn]).graph for site in block.rewrite.sites)
    return any(full is None or graph is None or fractions(full) != fractions(graph) for graph in small)


def realised(twin: ProofTwin, rewrites: Sequence[SmallRewrite], host: Host) -> tuple[PreTrainedModel, dict[str, str]]:
    """Return a copy of the stock twin with the modules of `rewrites` put in place by the loader's code.

    The second value has the reason for each rewrite, by its key, that the loader refuses. Weights have equal values.
    """
    model, refused = copied(twin.model), dict[str, str]()
    with temporary_folder("twin") as folder:
        for small in rewrites:
            try:
                for file, text in block_files(twin.captured, small.blocks).items():
                    (folder / file).parent.mkdir(exist_ok=True)
                    (folder / file).write_text(text, encoding="utf-8")
                realise(model, recipe(small.blocks, host), None, folder)
            except KtcError as error:
                refused[small.of.rewrite.key] = error.diagnostics[0].message
            except Exception as error:  # noqa: BLE001 - foreign code; the reason is part of the proof
                refused[small.of.rewrite.key] = f"it cannot be put in place: {in_a_line(error)}"
    return model, refused


# Graphs without sizes -------------------------------------------------------------------------------------------------
def significant(graph: fx.GraphModule) -> list[str]:
    """Return the names of the nodes that compute on data, in order."""
    return [n.name for n in nodes_of(graph) if _is_significant(n)]


def signature(graph: fx.GraphModule) -> tuple[object, ...]:
    """Return a graph without sizes: its operators with their choices, their connections and the parameters they use.

    Full and windowed attention of one class differ only in such a choice.
    """
    numbers = {name: i for i, name in enumerate(significant(graph))}
    rows: list[object] = []
    for node in nodes_of(graph):
        if _is_significant(node):
            data = (s for s in node.all_input_nodes if s.name in numbers or _carries_data(s))
            sources = tuple(numbers.get(source.name, str(source.target)) for source in map(_behind, data))
            rows.append((ops.operator(node), node.meta.get("fqn"), sources, _choices(node)))
    return tuple(rows)


def fractions(graph: fx.GraphModule) -> tuple[tuple[float, ...], ...]:
    """Return the fractional numbers among the arguments of each computing node, in order."""
    return tuple(
        tuple(a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float))
        for node in nodes_of(graph)
        if _is_significant(node)
    )


def _choices(node: fx.Node) -> tuple[tuple[str, object], ...]:
    """Return the attributes of a node that are not sizes, and whether attention has a window."""
    attributes = ops.attributes(node)
    chosen: list[tuple[str, object]] = [(name, v) for name, v in attributes.items() if isinstance(v, bool | str)]
    if ops.operator(node) == "sdpa":
        chosen.append(("windowed", int(attributes["window"]) >= 0))
    return tuple(sorted(chosen, key=lambda choice: choice[0]))


def _carries_data(node: fx.Node) -> bool:
    return "shape" in node.meta or ops.operator(node) == "getitem"


def _is_significant(node: fx.Node) -> bool:
    """Return whether a node computes on tensors. A node with several results has no shape of its own."""
    structure = node.op in ("placeholder", "get_attr", "output") or ops.operator(node) in ops.TRANSPARENT | {"getitem"}
    return not structure and ("shape" in node.meta or isinstance(node.meta.get("val"), tuple | list))


def _behind(node: fx.Node) -> fx.Node:
    """Return the node whose result `node` only reshapes, casts or picks from."""
    while ops.operator(node) in ops.TRANSPARENT or ops.operator(node) == "getitem":
        node = input_of(node, 0)
    return node
