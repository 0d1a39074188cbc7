"""The variables of the template of a linear kernel."""

from __future__ import annotations

from typing import Final

from ktc.isa import INSTRUCTION_SETS
from ktc.plan.linear_spec import LinearSpec

_ELEMENTS: Final = {"bf16": "ktc::bf16", "fp16": "ktc::weight_format::fp16", "fp32": "float"}


def choices(spec: LinearSpec) -> dict[str, object]:
    """Return the template's variables. The scalar ISA has lanes of fp32 for every element."""
    return {"isa": INSTRUCTION_SETS[spec.isa].cxx_type("float"), "element": _ELEMENTS[spec.dtype]}
