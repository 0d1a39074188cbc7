"""Planning: claims, devices and kernels decided for a host. It reads graphs and touches none."""

from ktc.stages.plan.make import make_plan
from ktc.stages.plan.memory import require_feasible
from ktc.stages.plan.nodes import kernel_origins
from ktc.stages.plan.types import (
    ANY_SIZE,
    BatchShape,
    BlockRewrite,
    Choices,
    DeviceMemory,
    LoraPlan,
    MemoryPlan,
    Placement,
    Plan,
    Reason,
)

__all__ = [
    "ANY_SIZE", "BatchShape", "BlockRewrite", "Choices", "DeviceMemory", "LoraPlan", "MemoryPlan", "Placement", "Plan",
    "Reason", "kernel_origins", "make_plan", "require_feasible",
]  # fmt: skip
