"""The variables of the template of a fused-MoE kernel, and the refusal of specs without a kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from ktc.diagnostics import Diagnostic
from ktc.foundation.formats import CODES, FORMATS
from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.kernels.form import Function
from ktc.model.kernels.fused_moe_spec import KERNELS, FusedMoeSpec

_ELEMENTS: Final = {"bf16": "ktc::bf16", "fp32": "float", "fp64": "double"}
_FUNCTIONS: Final[Mapping[Function, str]] = {
    "silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh", "relu": "Relu", "relu2": "Relu2",
}  # fmt: skip


def choices(spec: FusedMoeSpec) -> dict[str, object]:
    """Return the template's variables."""
    panels = {name: panel for name in spec.formats if (panel := FORMATS[name].panel)}
    constants = (spec.hidden, spec.intermediate, spec.num_experts, spec.top_k)
    return {
        "dims": ["ktc::kDynamic" if size is None else size for size in constants],
        "isa": INSTRUCTION_SETS[spec.isa].cxx_type(_ELEMENTS[spec.dtype]),
        "isa_headers": [spec.isa, f"{spec.isa}_int8"] if spec.integer_products else [spec.isa],
        "panels": [panel.type.format(spec.group_of(name)) for name, panel in panels.items()],
        "weight_headers": sorted({"packed", *(panel.header for panel in panels.values())}),
        "function": _FUNCTIONS[spec.activation.function],
        "constants": {name: _constant(value) for name, value in _constants(spec)},
    }


def unsupported(spec: FusedMoeSpec) -> Diagnostic | None:
    """Return the reason (H220) why no kernel is written for `spec`, if there is one."""
    groups = (CODES[name].group_sizes for name in spec.formats if name in CODES)
    choice = max(groups, key=len, default=(0,))  # of the format that allows one: at most one of a kernel's formats does
    if (
        set(spec.formats) <= set(KERNELS.get(spec.isa, ()))
        and (len(spec.formats) == 1 or not any(FORMATS[name].integer_products for name in spec.formats))
        and all(spec.dtype == FORMATS[name].dtype for name in spec.formats)
        and spec.group_size in choice
    ):
        return None
    stored = "/".join(spec.formats)
    written = "; ".join(f"`{isa}`: {', '.join(names)}" for isa, names in KERNELS.items())
    return Diagnostic(
        "H220",
        f"no kernel computes in `{spec.dtype}` on `{stored}` weights with `{spec.isa}`",
        hint=f"kernels exist for {written}",
    )


def _constants(spec: FusedMoeSpec) -> Iterator[tuple[str, float]]:
    yield "kAlpha", spec.activation.alpha
    yield "kLimit", math.inf if spec.activation.limit is None else spec.activation.limit
    yield "kUpOffset", spec.activation.up_offset
    yield "kGateCap", math.inf if spec.activation.gate_cap is None else spec.activation.gate_cap
    yield "kUpCap", math.inf if spec.activation.up_cap is None else spec.activation.up_cap


def _constant(value: float) -> str:
    """Write a double in C++, exact to the last bit."""
    return "std::numeric_limits<double>::infinity()" if value == math.inf else repr(float(value))
