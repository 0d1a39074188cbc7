"""The variables of the templates of attention kernels."""

from __future__ import annotations

from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.stages.codegen.linear import ELEMENTS


def choices(spec: AttentionSpec) -> dict[str, object]:
    """Return the template's variables. The scalar ISA computes in bf16, or has lanes of fp32 for other elements."""
    lanes = ELEMENTS["bf16" if spec.dtype == "bf16" else "fp32"]
    row = INSTRUCTION_SETS[spec.isa]
    return {"isa": row.cxx_type(lanes), "element": ELEMENTS[spec.dtype], "tiles": row.tiles}
