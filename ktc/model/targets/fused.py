"""`fused`: a router, a norm, an MLP or any other module runs as one kernel that is looked up by name.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktc.model.targets.target import Target


@dataclass(frozen=True, slots=True)
class Fused(Target):
    """`impl` names the kernel; `auto` takes the best one for the machine."""

    impl: str = "auto"

    name: ClassVar = "fused"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("router", "norm", "mlp", "module")
