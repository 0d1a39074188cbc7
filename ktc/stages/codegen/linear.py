"""The variables of the template of a linear kernel."""

from __future__ import annotations

from typing import Final

from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.kernels.linear_spec import LinearSpec

ELEMENTS: Final = {"bf16": "ktc::bf16", "fp16": "ktc::weight_format::fp16", "fp32": "float"}


def choices(spec: LinearSpec) -> dict[str, object]:
    """Return the template's variables. The scalar ISA computes in bf16, or has lanes of fp32 for other elements."""
    lanes = ELEMENTS["bf16" if spec.dtype == "bf16" else "fp32"]
    return {"isa": INSTRUCTION_SETS[spec.isa].cxx_type(lanes), "element": ELEMENTS[spec.dtype]}
