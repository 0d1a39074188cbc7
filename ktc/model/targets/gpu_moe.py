"""`gpu_moe`: the routed experts of a layer become one node on the GPU of their block.

No kernel of it is built yet, so each plan with it is refused (M066).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.targets.fake_quant import FakeQuant
from ktc.model.targets.lora_experts import LoraExperts
from ktc.model.targets.quantize import Quantize
from ktc.model.targets.settings import EnumName
from ktc.model.targets.target import Target
from ktc.model.targets.train import Train

if TYPE_CHECKING:
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan


@dataclass(frozen=True, slots=True)
class GpuMoe(Target):
    """`kernel` names the product of all experts."""

    kernel: Annotated[Literal["torch", "grouped_mm"], EnumName("moe_kernel")]

    name: ClassVar = "gpu_moe"
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("moe", "experts")
    consumes: ClassVar = ("experts",)
    fuses: ClassVar = (LoraExperts.name, Train.name, FakeQuant.name, Quantize.name)

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec:
        """Raise InputRefused (M066)."""
        message = f"`{self.name}` on `{plan.claim.path}` is not available in this version"
        raise InputRefused(Diagnostic("M066", message, plan.claim.span, hint="write `cpu_moe()` instead"))
