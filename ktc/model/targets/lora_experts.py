"""`lora_experts`: routed experts take LoRA, which the target that runs them computes in the same node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ktc.model.targets.settings import Alpha, EnumName, Rank
from ktc.model.targets.target import Target

ExpertPart = Annotated[Literal["gate", "up", "down"], EnumName("expert_part")]


@dataclass(frozen=True, slots=True)
class LoraExperts(Target):
    """`targets` are the matrices of an expert that are adapted. Unset settings are those of the `lora` block."""

    targets: tuple[ExpertPart, ...] = ("gate", "up", "down")
    rank: Rank | None = None
    alpha: Alpha | None = None

    name: ClassVar = "lora_experts"
    fixed_facet: ClassVar = "adapter"
    adapts: ClassVar = "experts"
    accepts: ClassVar = ("moe", "experts")
    default_captures: ClassVar = ("experts",)
