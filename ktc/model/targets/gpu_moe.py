"""`gpu_moe`: the routed experts of a layer become one node, whose weights stay on the GPU of their block.

The GPU multiplies codes as the CPU's kernels store them (`experts/gpu/coded_kernels.py`); LoRA on the experts is
carried out in the same node. Where the block is on the CPU, it is the first GPU. The CPU's kernel packs the weights,
which are sent once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktc.model.targets.cpu_moe import CpuMoe


@dataclass(frozen=True, slots=True)
class GpuMoe(CpuMoe):
    """The settings are those of `cpu_moe`; weights that are cut for NUMA nodes cannot be sent."""

    name: ClassVar = "gpu_moe"
    stays_on_gpu: ClassVar = True
