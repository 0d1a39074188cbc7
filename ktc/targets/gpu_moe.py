"""`gpu_moe`: the routed experts of a layer become one node on the GPU of their block.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ktc.targets.fake_quant import FakeQuant
from ktc.targets.lora_experts import LoraExperts
from ktc.targets.quantize import Quantize
from ktc.targets.settings import EnumName
from ktc.targets.target import Target
from ktc.targets.train import Train


@dataclass(frozen=True, slots=True)
class GpuMoe(Target):
    """`kernel` names the product of all experts."""

    kernel: Annotated[Literal["torch", "grouped_mm"], EnumName("moe_kernel")]

    name: ClassVar = "gpu_moe"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("moe", "experts")
    absorbs: ClassVar = ("experts",)
    hosts: ClassVar = (LoraExperts.name, Train.name, FakeQuant.name, Quantize.name)
