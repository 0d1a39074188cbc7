"""`gpu_moe`: the routed experts of a layer become one node on the GPU of their block.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ktc.model.targets.fake_quant import FakeQuant
from ktc.model.targets.lora_experts import LoraExperts
from ktc.model.targets.quantize import Quantize
from ktc.model.targets.settings import EnumName
from ktc.model.targets.target import Target
from ktc.model.targets.train import Train


@dataclass(frozen=True, slots=True)
class GpuMoe(Target):
    """`kernel` names the product of all experts."""

    kernel: Annotated[Literal["torch", "grouped_mm"], EnumName("moe_kernel")]

    name: ClassVar = "gpu_moe"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("moe", "experts")
    absorbs: ClassVar = ("experts",)
    hosts: ClassVar = (LoraExperts.name, Train.name, FakeQuant.name, Quantize.name)
