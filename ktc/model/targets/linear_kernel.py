"""Choosing a linear kernel: the settings of `kt_linear`, the model's dtype, the layer's device, the host -> its spec.

With `gemv`, weights that a GGUF file stores in blocks are multiplied as they are stored, by few rows and by many: in
programs that train nothing, unless `prefill = torch` requires PyTorch's product.
Refused (M077): `gemv` or `packed` for a layer on another device than the CPU, or with weights that they do not
multiply. `auto`, as either, is PyTorch's product there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.formats import BLOCKS, WeightFormat
from ktc.foundation.isa import PREFERENCE
from ktc.model.experts.layouts.panel_codes import codes_of
from ktc.model.kernels.fused_moe_spec import KERNELS
from ktc.model.kernels.linear_spec import ISAS, Dtype, LinearSpec, PackedLinearSpec
from ktc.model.targets.node_plan import CapturedNode, NodePlan

DTYPES: Final[Mapping[torch.dtype, Dtype]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
_PACKED: Final = (torch.bfloat16,)


def choose_linear(
    plan: NodePlan, seen: CapturedNode, kernel: str, prefill: str | None
) -> LinearSpec | PackedLinearSpec | None:
    """Return the kernel of a layer, `None` if PyTorch runs it. `kernel` and `prefill` are the rule's words.

    Raises InputRefused (M077).
    """
    if kernel == "auto" and plan.device != "cpu" and prefill != "torch" and (stored := blocks_on_gpus(seen)):
        return _packed(stored, seen)
    if kernel == "auto":
        kernel = "gemv" if plan.device == "cpu" and seen.dtype in DTYPES else "torch"
    named = [("gemv", DTYPES)] * (kernel == "gemv") + [("packed", _PACKED)] * (prefill == "packed")
    for name, dtypes in named:
        if plan.device != "cpu":
            raise unsuited_layer(plan, name, f"the layer is on {plan.device}, and `{name}` runs on the CPU")
        if seen.dtype not in dtypes:
            stored = str(seen.dtype).removeprefix("torch.")
            raise unsuited_layer(plan, name, f"its weights are {stored}, which `{name}` does not multiply")
    if not named and not (prefill == "auto" and plan.device == "cpu" and seen.dtype in _PACKED):
        return None
    stored = _stored_blocks(seen) if kernel == "gemv" and prefill != "torch" and seen.dtype in _PACKED else None
    packed = _packed(stored, seen) if stored else None
    return packed or LinearSpec("linear", DTYPES[seen.dtype], next(isa for isa in ISAS if isa in seen.host.isas))


def blocks_on_gpus(seen: CapturedNode) -> WeightFormat | None:
    """Return the format of the layer's stored weight where a GPU multiplies it, and the CPU packs it for that."""
    stored = _stored_blocks(seen) if seen.dtype in _PACKED else None
    return stored if stored and codes_of(BLOCKS[stored]) is not None and _packed(stored, seen) else None


def _packed(stored: WeightFormat, seen: CapturedNode) -> PackedLinearSpec | None:
    """Return the kernel for weights in this format, of the host's best instruction set that has one."""
    for isa in PREFERENCE:
        if isa in seen.host.isas and stored in KERNELS[isa]:
            return PackedLinearSpec("packed_linear", "bf16", stored, isa)
    return None


def _stored_blocks(seen: CapturedNode) -> WeightFormat | None:
    """Return the format of the layer's stored weight where it is blocks that kernels multiply."""
    for source in () if seen.trains else seen.sources:
        row = BLOCKS.get(source.plain_rows or "")
        if row is not None and source.target.endswith(".weight") and source.loaded_shape[1] % row.whole == 0:
            return row.name
    return None


def unsuited_layer(plan: NodePlan, kernel: str, why: str) -> InputRefused:
    """Return the refusal (M077) of a layer that a kernel does not compute."""
    message = f"`{kernel}` of `{plan.target.name}` on `{plan.claim.path}`: {why}"
    return InputRefused(Diagnostic("M077", message, plan.claim.span, hint="write `torch` instead, or narrow the rule"))
