"""Apply the plan's rewrites to a witness with the same passes and compare there.

A witness is a shrunk model of the same family: same classes, same code paths, small widths, random weights and buffers.
A block of the witness represents a block of the model only if their normal forms differ in sizes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel

from ktc import twin
from ktc.capture import BlockGraph, CapturedModel, ExpertList, ModelSource, capture
from ktc.diagnostics import Diagnostic, ProofFailed
from ktc.experts.module import FusedMoe
from ktc.experts.stock_layout import canonical_parts, stock_names
from ktc.graph import ops
from ktc.graph.typed import input_of, named_modules, nodes_of, owner_of
from ktc.model.graph_block import ExpertStack, stacked_experts
from ktc.plan import BlockRewrite
from ktc.prove.compare import Call, InDouble, Proof, compare
from ktc.rewrite import RewrittenBlock, rewrite_block
from ktc.targets.module_target import replaced

SEED = 20260
# One token; an odd length; more tokens than experts times groups, so that every routing decision is exercised.
SHAPES = ((1, 1), (3, 37), (2, 64))


@dataclass(frozen=True, slots=True)
class Witness:
    """A small model that runs: its capture, the model with seeded weights, and its blocks' calls, one per shape."""

    captured: CapturedModel
    model: PreTrainedModel
    calls: Mapping[str, list[Call]]


def prove(captured: CapturedModel, blocks: Sequence[RewrittenBlock]) -> tuple[Proof, ...]:
    """Prove every distinct rewrite. Raises ProofFailed if a proof does not hold or the witness has no such block."""
    config = twin.shrink(captured.source.config)
    config.dtype = torch.float32
    witness = witness_of(capture(ModelSource("witness", None, config, None)))
    proofs = tuple(prove_block(captured, block, witness) for block in blocks)
    failed = [_failure(proof, block) for proof, block in zip(proofs, blocks, strict=True) if not proof.holds]
    if failed:
        raise ProofFailed(*failed)
    return proofs


@contextmanager
def _one_thread() -> Generator[None]:
    """Run on one thread inside: on a small witness all threads would wait for the slowest at every operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def witness_of(captured: CapturedModel) -> Witness:
    """Return the fp32 witness of a capture of witness size. Raises ProofFailed (P302) if it does not run."""
    with _one_thread():
        model = twin.build(captured.source.config, SEED, torch.float32, "cpu")
        _choose_stock_code(model)
        return Witness(captured, model, _recorded(model, {site.fqn for site in captured.sites}))


def _choose_stock_code(model: PreTrainedModel) -> None:
    """Choose the plainest stock implementations, with which rewrites are compared."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # attention with sinks has only eager code
        model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")


def _recorded(model: PreTrainedModel, fqns: set[str]) -> dict[str, list[Call]]:
    try:
        return record_calls(model, fqns)
    except Exception as error:  # foreign code on an unusual config raises anything
        words = (str(error).strip().splitlines() or [""])[0][:200]
        message = f"the shrunk witness of this model does not run in transformers: {type(error).__name__}: {words}"
        raise ProofFailed(Diagnostic("P302", message, hint="try another version of transformers")) from error


def prove_block(captured: CapturedModel, block: RewrittenBlock, witness: Witness) -> Proof:
    """Return the proof of one rewrite, valid or not. Raises ProofFailed (P301) if the witness has no such block."""
    full = captured.block(block.rewrite.block)
    assert full.graph is not None
    shape_free = signature(full.graph)
    small = next((b for b in witness.captured.blocks if b.graph is not None and signature(b.graph) == shape_free), None)
    if small is None or small.graph is None:
        raise ProofFailed(_no_witness(full))
    renamed = dict(zip(significant(full.graph), significant(small.graph), strict=True))
    actions = tuple(replace(action, node=renamed[action.node]) for action in block.rewrite.actions)
    site = witness.captured.sites_of(small.key)[0]
    # The witness is on the CPU; the transfers of the plan's placement copy values and change none.
    graph = rewrite_block(small.graph, BlockRewrite(block.rewrite.key, small.key, (site,), actions, "cpu"))
    original = witness.model.get_submodule(site.fqn)
    rules = tuple(dict.fromkeys(a.rule for a in actions))
    for precision in (nullcontext, InDouble):
        if precision is InDouble:
            original, graph = copy.deepcopy(original).double(), graph.double()
        bind(graph, original, small.experts)
        with _one_thread(), precision():
            forward, gradients = compare(original, graph, witness.calls[site.fqn], SEED)
        proof = Proof(block.rewrite.key, full.class_name, rules, forward, gradients, SHAPES, SEED)
        if proof.holds or not proof.is_close:
            break
    return proof


def _no_witness(block: BlockGraph) -> Diagnostic:
    return Diagnostic(
        "P301",
        f"the shrunk witness has no block like `{block.key}` (`{block.class_name}`), so the rewrite cannot be proven",
        hint="please report this model's config: the witness builder needs to learn it",
    )


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


def bind(graph: fx.GraphModule, original: nn.Module, experts: ExpertList | None = None) -> None:
    """Bind a rewritten graph to the tensors of the block it replaces: experts are loaded, everything else is shared."""
    for name, module in named_modules(graph):
        if isinstance(module, FusedMoe):
            sizes = (module.num_experts, module.hidden, module.intermediate, module.top_k)
            dtype = next(p.dtype for p in original.parameters() if p.is_floating_point())
            replacement = FusedMoe(*sizes, str(module.form), dtype=dtype)
            load_experts(replacement, replaced(original, name), experts)
            graph.set_submodule(name, replacement)
    tensors = {**dict(original.named_parameters()), **dict(original.named_buffers())}
    for name in [n for n, _ in [*graph.named_parameters(), *graph.named_buffers()] if n in tensors]:
        setattr(*owner_of(graph, name), tensors[name])


def load_experts(module: FusedMoe, experts: nn.Module, listed: ExpertList | None = None) -> None:
    """Load the weights of a stock experts module of the same form, or of the modules that `listed` describes."""
    if listed is not None and isinstance(experts, nn.ModuleList):
        experts = ExpertStack(stacked_experts(experts, module.form, listed.parts))
    for name in stock_names(module.form):
        stacked = experts.get_parameter(name)
        for expert in range(module.num_experts):
            for part, tensor in canonical_parts(module.form, name, stacked[expert]):
                module.load_expert(expert, part, tensor)


def record_calls(model: PreTrainedModel, fqns: set[str]) -> dict[str, list[Call]]:
    """Return the calls of every block in one forward of the witness per shape."""
    calls: dict[str, list[Call]] = {fqn: [] for fqn in fqns}

    def remember(fqn: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[fqn].append(Call(args, kwargs))

        return hook

    handles = [model.get_submodule(f).register_forward_pre_hook(remember(f), with_kwargs=True) for f in fqns]
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config().vocab_size
    with torch.no_grad():
        for batch, length in SHAPES:
            model(input_ids=torch.randint(0, vocabulary, (batch, length), generator=generator), use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def _failure(proof: Proof, block: RewrittenBlock) -> Diagnostic:
    worst = max(proof.gradients, key=lambda name: proof.gradients[name], default="")
    errors = f"forward {proof.forward:.1e}, worst gradient {proof.worst_gradient:.1e} ({worst})"
    errors += f", allowed {proof.tolerance:.0e}"
    span = block.rewrite.actions[0].span
    return Diagnostic(
        "P300",
        f"the rewrite of `{proof.block}` does not compute what the original does: {errors}",
        span,
        hint="this is a bug in a pattern or a pass, not in the rule file; please report it with the model's config",
    )
