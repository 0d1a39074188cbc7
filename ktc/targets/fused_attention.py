"""`fused_attention`: the core of attention is computed by the kernel that a rule names.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktc.targets.settings import ATTENTION_WITHOUT_BACKWARD, AttentionKernel
from ktc.targets.target import Target


@dataclass(frozen=True, slots=True)
class FusedAttention(Target):
    """`kernel` names the core."""

    kernel: AttentionKernel

    name: ClassVar = "fused_attention"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("attention", "mla")
    absorbs: ClassVar = ("core",)
    without_backward: ClassVar = ATTENTION_WITHOUT_BACKWARD
