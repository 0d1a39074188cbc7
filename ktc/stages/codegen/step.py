"""The variables of the template of a kernel for decoding steps."""

from __future__ import annotations

from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.kernels.step_spec import StepSpec
from ktc.stages.codegen.linear import ELEMENTS


def choices(spec: StepSpec) -> dict[str, object]:
    """Return the template's variables. Operations compute in lanes of fp32."""
    return {"isa": INSTRUCTION_SETS[spec.isa].cxx_type(ELEMENTS["fp32"])}
