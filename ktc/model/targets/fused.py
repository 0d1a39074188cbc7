"""`fused`: a router runs as one kernel, from the logits to the chosen experts and their weights.

No kernel of it is built yet, so each plan with it is refused (M095).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.targets.target import Target

if TYPE_CHECKING:
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan


@dataclass(frozen=True, slots=True)
class Fused(Target):
    """The kernel follows from the router's own routing: it has no settings."""

    name: ClassVar = "fused"
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("router",)

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec:
        """Raise InputRefused (M095)."""
        message = f"`{self.name}` on `{plan.claim.path}`: no kernel computes its routing"
        raise InputRefused(Diagnostic("M095", message, plan.claim.span, hint="leave it out of the rule"))
