"""The variables of the template of a kernel for decoding steps."""

from __future__ import annotations

from ktc.codegen.linear import ELEMENTS
from ktc.isa import INSTRUCTION_SETS
from ktc.plan.step_spec import StepSpec


def choices(spec: StepSpec) -> dict[str, object]:
    """Return the template's variables. Operations compute in lanes of fp32."""
    return {"isa": INSTRUCTION_SETS[spec.isa].cxx_type(ELEMENTS["fp32"])}
