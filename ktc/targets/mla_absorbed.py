"""`mla_absorbed`: latent attention works on the compressed cache, with the up-projection of keys and values folded in.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ktc.targets.settings import ATTENTION_WITHOUT_BACKWARD, AttentionKernel, Phase, Words
from ktc.targets.target import Target


@dataclass(frozen=True, slots=True)
class MlaAbsorbed(Target):
    """`absorb` is the phase that runs absorbed; `move_elision` leaves out copies of what attention only reads."""

    cache: Annotated[Literal["compressed", "expanded"], Words("cache")] = "compressed"
    absorb: Phase = "decode"
    move_elision: bool = True
    kernel: AttentionKernel = "sdpa"

    name: ClassVar = "mla_absorbed"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("mla",)
    absorbs: ClassVar = ("kv_b", "core")
    without_backward: ClassVar = ATTENTION_WITHOUT_BACKWARD
