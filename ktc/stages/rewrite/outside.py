"""The recipe's rows of linear layers outside the captured blocks."""

from __future__ import annotations

from collections.abc import Iterator

from ktc.model.manifest.manifest import Rewrite
from ktc.model.targets import KtLinear
from ktc.stages.plan import Plan


def outside_rows(plan: Plan) -> tuple[Rewrite, ...]:
    """Return the loader's steps for the layers that a rule gives a kernel."""
    return tuple(_rows(plan))


def _rows(plan: Plan) -> Iterator[Rewrite]:
    for each in plan.outside:
        action, target = each.action, each.action.target
        assert isinstance(target, KtLinear), f"`{target.name}` puts no linear layer"
        entry = action.kernel.entry if action.kernel else None
        arguments = target.module_arguments(action, plan.host)
        yield Rewrite(action.fqn, target.placed(action), entry, each.device, arguments, action.rule, str(action.span))
