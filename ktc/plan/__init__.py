"""Planning: claims, devices and kernels decided for a host. It reads graphs and touches none."""

from ktc.plan.make import make_plan
from ktc.plan.types import BlockRewrite, DeviceLoad, LoraPlan, NodeAction, Placement, Plan, Reason

__all__ = ["BlockRewrite", "DeviceLoad", "LoraPlan", "NodeAction", "Placement", "Plan", "Reason", "make_plan"]
