"""Choosing a linear kernel: a `kt_linear` claim, the dtype of the model, the layer's device, the host -> a LinearSpec.

Refused (M077): `gemv` for a layer on another device than the CPU, or with weights that it does not multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.host import Host
from ktc.plan.linear_spec import ISAS, Dtype, LinearSpec
from ktc.plan.types import Claim
from ktc.targets import KtLinear

_DTYPES: Final[Mapping[torch.dtype, Dtype]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


def choose_linear(claim: Claim, target: KtLinear, dtype: torch.dtype, device: str, host: Host) -> LinearSpec | None:
    """Return the kernel of a claim, `None` if PyTorch runs the layer. Raise InputRefused (M077)."""
    if target.kernel != "gemv":
        return None
    if device != "cpu":
        raise _unsuited(claim, f"the layer is on {device}, and `gemv` runs on the CPU")
    if dtype not in _DTYPES:
        raise _unsuited(claim, f"its weights are {str(dtype).removeprefix('torch.')}, which `gemv` does not multiply")
    return LinearSpec("linear", _DTYPES[dtype], next(isa for isa in ISAS if isa in host.isas))


def _unsuited(claim: Claim, why: str) -> InputRefused:
    message = f"`{KtLinear.name}(gemv)` on `{claim.path}`: {why}"
    hint = f"write `{KtLinear.name}(torch)`, or narrow the rule"
    return InputRefused(Diagnostic("M077", message, claim.span, hint=hint))
