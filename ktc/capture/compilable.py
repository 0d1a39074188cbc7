"""Requirements of a compilable model beyond capture: routed experts, and a checkpoint in a folder."""

from __future__ import annotations

from ktc.capture.types import CapturedModel
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.graph import ops
from ktc.graph.typed import nodes_of


def require_compilable(captured: CapturedModel) -> None:
    """Raise InputRefused for a dense model (I105) and for one without weights (I106)."""
    if _is_dense(captured):
        message = f"this `{captured.source.config.model_type}` model has no routed experts"
        hint = "ktc compiles mixture-of-experts models; `ktc graph MODEL` shows its blocks"
        raise InputRefused(Diagnostic("I105", message, hint=hint))
    if captured.source.index is None or captured.source.folder is None:
        message = f"`{captured.source.name}` has no weights to compile"
        raise InputRefused(Diagnostic("I106", message, hint="`ktc check RULES MODEL` needs only config.json"))


def _is_dense(captured: CapturedModel) -> bool:
    """Return whether every block was captured and none has experts; the plan reports blocks that were not captured."""
    graphs = [block.graph for block in captured.blocks if block.graph is not None]
    found = any(ops.operator(node) == "experts" for graph in graphs for node in nodes_of(graph))
    return len(graphs) == len(captured.blocks) and not found
