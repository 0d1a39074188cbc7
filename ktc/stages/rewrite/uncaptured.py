"""The recipe's rows of linear layers outside the captured blocks."""

from __future__ import annotations

from ktc.model.manifest.manifest import Rewrite
from ktc.stages.plan import Plan
from ktc.stages.rewrite.recipe import step_of


def uncaptured_rows(plan: Plan) -> tuple[Rewrite, ...]:
    """Return the loader's steps for the layers that a rule gives a kernel."""
    return tuple(step_of(linear.action, linear.action.fqn, linear.device, {}, plan.host) for linear in plan.uncaptured)
