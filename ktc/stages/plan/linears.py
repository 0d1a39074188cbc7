"""Choosing a linear kernel: a `kt_linear` claim, the model's dtype, the layer's device, the host -> its spec.

With `gemv`, weights that a GGUF file stores in blocks are multiplied as they are stored, by few rows and by many: in
programs that train nothing, unless `prefill = torch` requires PyTorch's product.
Refused (M077): `gemv` or `packed` for a layer on another device than the CPU, or with weights that they do not
multiply. `auto` is PyTorch's product there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.formats import BLOCKS
from ktc.foundation.host import Host
from ktc.foundation.isa import PREFERENCE
from ktc.model.checkpoint import WeightSource
from ktc.model.kernels.kernel_spec import KERNELS
from ktc.model.kernels.linear_spec import ISAS, Dtype, LinearSpec, PackedLinearSpec
from ktc.model.targets import KtLinear
from ktc.stages.plan.types import Claim

DTYPES: Final[Mapping[torch.dtype, Dtype]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
_PACKED: Final = (torch.bfloat16,)


def choose_linear(
    claim: Claim, target: KtLinear, dtype: torch.dtype, device: str, host: Host, stored: str | None = None
) -> LinearSpec | PackedLinearSpec | None:
    """Return the kernel of a claim, `None` if PyTorch runs the layer. Raise InputRefused (M077).

    `stored` is the format of blocks in which the weight may stay.
    """
    named = [("gemv", DTYPES)] * (target.kernel == "gemv") + [("packed", _PACKED)] * (target.prefill == "packed")
    for kernel, dtypes in named:
        if device != "cpu":
            raise _unsuited(claim, kernel, f"the layer is on {device}, and `{kernel}` runs on the CPU")
        if dtype not in dtypes:
            found = str(dtype).removeprefix("torch.")
            raise _unsuited(claim, kernel, f"its weights are {found}, which `{kernel}` does not multiply")
    if not named and not (target.prefill == "auto" and device == "cpu" and dtype in _PACKED):
        return None
    if target.kernel == "gemv" and target.prefill != "torch" and dtype in _PACKED and stored is not None:
        for isa in PREFERENCE:
            if isa in host.isas and stored in KERNELS[isa]:
                return PackedLinearSpec("packed_linear", "bf16", stored, isa)
    return LinearSpec("linear", DTYPES[dtype], next(isa for isa in ISAS if isa in host.isas))


def stored_rows(weights: Sequence[WeightSource]) -> Mapping[str, str]:
    """Return the format of the linear layers whose stored weight is blocks that kernels multiply, by FQN."""
    found: dict[str, str] = {}
    for source in weights:
        fqn, _, leaf = source.target.rpartition(".")
        row = BLOCKS.get(source.plain_rows or "")
        if row is not None and leaf == "weight" and source.loaded_shape[1] % row.whole == 0:
            found[fqn] = row.name
    return found


def _unsuited(claim: Claim, kernel: str, why: str) -> InputRefused:
    message = f"`{kernel}` of `{KtLinear.name}` on `{claim.path}`: {why}"
    hint = "write `torch` instead, or narrow the rule"
    return InputRefused(Diagnostic("M077", message, claim.span, hint=hint))
