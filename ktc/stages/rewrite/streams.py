"""The recipe's rows of streamed linear layers."""

from __future__ import annotations

from ktc.model.manifest.manifest import Rewrite
from ktc.stages.plan import Plan


def stream_rows(plan: Plan) -> tuple[Rewrite, ...]:
    """Return the loader's steps for the linear layers that a device computes from weights in host memory."""
    return tuple(
        Rewrite(
            each.fqn, "streamed_linear", None, each.device, {"stream_buffer": each.buffer}, each.rule, str(each.span)
        )
        for each in plan.streams
    )
