"""KernelSpecs to C++ text: one translation unit per kernel, one that lists them and one for the Python module.

The templates choose and instantiate; what is computed stands in `runtime/include/ktc`. Refused: a combination of
instruction set and weight format for which no kernel is written.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import jinja2

from ktc import resources
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.experts.form import Function
from ktc.formats import CODES, FORMATS
from ktc.isa import INSTRUCTION_SETS, Isa
from ktc.plan.kernel_spec import KERNELS, KernelSpec
from ktc.plan.linear_spec import LinearSpec

_ELEMENTS: Final = {"bf16": "ktc::bf16", "fp16": "ktc::weight_format::fp16", "fp32": "float", "fp64": "double"}
_FUNCTIONS: Final[Mapping[Function, str]] = {
    "silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh", "relu": "Relu", "relu2": "Relu2",
}  # fmt: skip
_COMMENT_WIDTH: Final = 117
# A rule file may be called anything; in a comment of C++ only what cannot end it may stand.
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_./: +()-]")


@dataclass(frozen=True, slots=True)
class TranslationUnit:
    """One C++ file. `isa` says which instructions the compiler may use in it; the bindings use none in particular."""

    name: str
    text: str
    isa: Isa

    @property
    def code(self) -> str:
        """The text without its first line, which only says what rule asked for the kernel."""
        return self.text.partition("\n")[2]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The text of a kernel library, and the specs it was rendered from."""

    units: tuple[TranslationUnit, ...]
    specs: tuple[KernelSpec, ...]
    linears: tuple[LinearSpec, ...] = ()

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """What the library lists, each with the dtype that it computes in."""
        return tuple((spec.entry, spec.dtype) for spec in (*self.specs, *self.linears))


def render(specs: Sequence[KernelSpec | LinearSpec], origin: Mapping[KernelSpec | LinearSpec, str]) -> KernelSource:
    """Render the kernels of one model. `origin` names the rule that asked for each (`experts (moe.ktr:6:3)`).

    The result does not depend on the order of `specs` or on repeats. Raises `InputRefused` (H220) with every spec for
    which there is no kernel.
    """
    ordered = sorted(set(specs), key=lambda spec: spec.entry)
    distinct = tuple(spec for spec in ordered if isinstance(spec, KernelSpec))
    linears = tuple(spec for spec in ordered if isinstance(spec, LinearSpec))
    faults = [fault for spec in distinct if (fault := _unsupported(spec))]
    if faults:
        raise InputRefused(*faults)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.templates()),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    kernel = environment.get_template("fused_moe.cpp.j2")
    units = [
        TranslationUnit(f"{spec.entry}.cpp", kernel.render(_choices(spec, origin.get(spec, "none"))), spec.isa)
        for spec in distinct
    ]
    linear = environment.get_template("linear.cpp.j2")
    for spec in linears:
        text = linear.render(_linear_choices(spec, origin.get(spec, "none")))
        units.append(TranslationUnit(f"{spec.entry}.cpp", text, spec.isa))
    bindings = environment.get_template("bindings.cpp.j2").render(specs=(*distinct, *linears))
    units.append(TranslationUnit("bindings.cpp", bindings, "scalar"))
    module = (resources.runtime_bindings() / "module.cpp").read_text(encoding="utf-8")
    return KernelSource((*units, TranslationUnit("module.cpp", module, "scalar")), distinct, linears)


def _unsupported(spec: KernelSpec) -> Diagnostic | None:
    groups = (CODES[name].group_sizes for name in spec.formats if name in CODES)
    choice = max(groups, key=len, default=(0,))  # of the format that leaves one: at most one of a kernel's does
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


def _choices(spec: KernelSpec, origin: str) -> dict[str, object]:
    """What the template of one kernel may ask."""
    panels = {name: panel for name in spec.formats if (panel := FORMATS[name].panel)}
    constants = (spec.hidden, spec.intermediate, spec.num_experts, spec.top_k)
    text = ", ".join(f"{field.name}={getattr(spec, field.name)}" for field in fields(spec))
    return {
        "spec": spec,
        "spec_lines": textwrap.wrap(f"KernelSpec: {text}", _COMMENT_WIDTH),
        "origin": _UNSAFE.sub("_", origin),
        "dims": ["ktc::kDynamic" if size is None else size for size in constants],
        "isa": INSTRUCTION_SETS[spec.isa].cxx_type(_ELEMENTS[spec.dtype]),
        "isa_headers": [spec.isa, f"{spec.isa}_int8"] if spec.integer_products else [spec.isa],
        "panels": [panel.type.format(spec.group_of(name)) for name, panel in panels.items()],
        "weight_headers": sorted({"packed", *(panel.header for panel in panels.values())}),
        "function": _FUNCTIONS[spec.activation.function],
        "constants": {name: _constant(value) for name, value in _constants(spec)},
    }


def _linear_choices(spec: LinearSpec, origin: str) -> dict[str, object]:
    """What the template of a linear kernel may ask. The scalar ISA has lanes of fp32, whatever the element."""
    return {
        "spec": spec,
        "spec_line": f"LinearSpec: op={spec.op}, dtype={spec.dtype}, isa={spec.isa}",
        "origin": _UNSAFE.sub("_", origin),
        "isa": INSTRUCTION_SETS[spec.isa].cxx_type("float"),
        "element": _ELEMENTS[spec.dtype],
    }


def _constants(spec: KernelSpec) -> Iterator[tuple[str, float]]:
    yield "kAlpha", spec.activation.alpha
    yield "kLimit", math.inf if spec.activation.limit is None else spec.activation.limit
    yield "kUpOffset", spec.activation.up_offset


def _constant(value: float) -> str:
    """A double in C++, to the last bit."""
    return "std::numeric_limits<double>::infinity()" if value == math.inf else repr(float(value))
