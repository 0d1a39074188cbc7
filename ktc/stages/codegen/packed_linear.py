"""The variables of the template of a packed linear kernel."""

from __future__ import annotations

from ktc.foundation.formats import BLOCKS
from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.kernels.linear_spec import PackedLinearSpec


def choices(spec: PackedLinearSpec) -> dict[str, object]:
    """Return the template's variables."""
    panel = BLOCKS[spec.weight_format].panel
    assert panel is not None, "formats that kernels multiply have a panel"
    return {"isa": INSTRUCTION_SETS[spec.isa].cxx_type("ktc::bf16"), "panel": panel.type, "header": panel.header}
