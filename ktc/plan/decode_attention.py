"""Choosing a decode attention kernel: a claim with `kernel = flash_decode`, the model's dtype, its device, the host.

Refused (M077): a layer on another device than the CPU, or a dtype that the kernel does not compute in.
"""

from __future__ import annotations

import torch

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.host import Host
from ktc.plan.attention_spec import AttentionSpec
from ktc.plan.linear_spec import ISAS
from ktc.plan.linears import DTYPES
from ktc.plan.types import Claim
from ktc.targets.settings import FLASH_DECODE


def choose_attention(claim: Claim, dtype: torch.dtype, device: str, host: Host) -> AttentionSpec:
    """Return the kernel of a claim. Raise InputRefused (M077)."""
    why = ""
    if device != "cpu":
        why = f"the layer is on {device}, and `{FLASH_DECODE}` runs on the CPU"
    elif dtype not in DTYPES:
        why = f"the model is {str(dtype).removeprefix('torch.')}, which `{FLASH_DECODE}` does not compute in"
    if why:
        message = f"`{FLASH_DECODE}` of `{claim.target.name}` on `{claim.path}`: {why}"
        raise InputRefused(Diagnostic("M077", message, claim.span, hint="write `sdpa` instead, or narrow the rule"))
    return AttentionSpec("attention", DTYPES[dtype], next(isa for isa in ISAS if isa in host.isas))
