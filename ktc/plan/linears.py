"""Choosing a linear kernel: a `kt_linear` claim, the dtype of the model, the layer's device, the host -> a LinearSpec.

Refused (M077): `gemv` or `packed` for a layer on another device than the CPU, or with weights that they do not
multiply. `auto` is PyTorch's product there.
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
_PACKED: Final = (torch.bfloat16,)


def choose_linear(claim: Claim, target: KtLinear, dtype: torch.dtype, device: str, host: Host) -> LinearSpec | None:
    """Return the kernel of a claim, `None` if PyTorch runs the layer. Raise InputRefused (M077)."""
    named = [("gemv", _DTYPES)] * (target.kernel == "gemv") + [("packed", _PACKED)] * (target.prefill == "packed")
    for kernel, dtypes in named:
        if device != "cpu":
            raise _unsuited(claim, kernel, f"the layer is on {device}, and `{kernel}` runs on the CPU")
        if dtype not in dtypes:
            found = str(dtype).removeprefix("torch.")
            raise _unsuited(claim, kernel, f"its weights are {found}, which `{kernel}` does not multiply")
    if not named and not (target.prefill == "auto" and device == "cpu" and dtype in _PACKED):
        return None
    return LinearSpec("linear", _DTYPES[dtype], next(isa for isa in ISAS if isa in host.isas))


def _unsuited(claim: Claim, kernel: str, why: str) -> InputRefused:
    message = f"`{kernel}` of `{KtLinear.name}` on `{claim.path}`: {why}"
    hint = "write `torch` instead, or narrow the rule"
    return InputRefused(Diagnostic("M077", message, claim.span, hint=hint))
