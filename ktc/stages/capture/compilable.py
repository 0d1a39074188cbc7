"""Requirements of a compilable model beyond capture: routed experts, and a checkpoint in a folder."""

from __future__ import annotations

from collections.abc import Iterator

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.graph import ops
from ktc.model.graph.typed import named_modules, nodes_of
from ktc.stages.capture.expert_list import candidates
from ktc.stages.capture.types import CapturedModel


def require_compilable(captured: CapturedModel, *, needs_weights: bool = True) -> None:
    """Raise InputRefused for a dense model (I105), or one without a folder or the weights that it needs (I106)."""
    if _is_dense(captured):
        message = f"this `{captured.source.config.model_type}` model has no routed experts"
        if unread := next(_unread(captured), ""):
            message += f" in a form that ktc reads: {unread}"
        hint = "ktc compiles mixture-of-experts models; `ktc graph MODEL` shows its blocks"
        raise InputRefused(Diagnostic("I105", message, hint=hint))
    if captured.source.folder is None or (needs_weights and captured.source.index is None):
        message = f"`{captured.source.name}` has no weights to compile"
        raise InputRefused(Diagnostic("I106", message, hint="`ktc check RULES MODEL` needs only config.json"))


def _is_dense(captured: CapturedModel) -> bool:
    """Return whether every block was captured and none has experts; the plan reports blocks that were not captured."""
    graphs = [block.graph for block in captured.blocks if block.graph is not None]
    has_experts = any(ops.operator(node) == "experts" for graph in graphs for node in nodes_of(graph))
    return len(graphs) == len(captured.blocks) and not has_experts


def _unread(captured: CapturedModel) -> Iterator[str]:
    """Yield each block that holds stacked matrices or a list of equal modules, in words."""
    for block in captured.blocks:
        site = captured.sites_of(block.key)[0].fqn
        module = captured.model.get_submodule(site)
        for _, inner in named_modules(module):
            stacked = {name: p for name, p in inner.named_parameters(recurse=False) if p.dim() == 3}
            counts = {int(p.shape[0]) for p in stacked.values()}
            if len(stacked) > 1 and len(counts) == 1:
                names = ", ".join(f"`{name}`" for name in stacked)
                code = "whose code is neither a loop over experts nor batched products by expert"
                yield f"`{type(inner).__name__}` in `{site}` holds {counts.pop()} matrices in each of {names}, {code}"
        for fqn, modules in candidates(module):
            code = "and its code is not a loop that routes tokens to them"
            yield f"`{block.class_name}` at `{site}` holds {len(modules)} equal modules in `{fqn}`, {code}"
