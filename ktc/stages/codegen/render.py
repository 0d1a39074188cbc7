"""Specs of kernels to C++: a translation unit per kernel, one that lists them, and those that every library has.

The templates choose and instantiate; the computation is in `runtime/include/ktc`. Refused: a spec for which no kernel
is written.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import jinja2

from ktc.diagnostics import InputRefused
from ktc.foundation import resources
from ktc.foundation.isa import Isa
from ktc.model.kernels.spec import Spec
from ktc.stages.codegen.kinds import kind_of

_COMMENT_WIDTH: Final = 117
# The name of a rule file is arbitrary; a comment of C++ may contain only characters that cannot end it.
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_./: +()-]")


@dataclass(frozen=True, slots=True)
class TranslationUnit:
    """One C++ file. The compiler may use the instructions of `isa` in it; the bindings need none in particular."""

    name: str
    text: str
    isa: Isa

    @property
    def code(self) -> str:
        """The text without its first line, which only names the rule that requests the kernel."""
        return self.text.partition("\n")[2]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The text of a kernel library, and the specs it was rendered from."""

    units: tuple[TranslationUnit, ...]
    specs: tuple[Spec, ...]

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """The entries of the library, each with the dtype that it computes in."""
        return tuple((spec.entry, spec.dtype) for spec in self.specs)


def render(specs: Sequence[Spec], origin: Mapping[Spec, str]) -> KernelSource:
    """Render the kernels of one model. `origin` names the rule that requests each (`experts (moe.ktr:6:3)`).

    The result does not depend on the order of `specs` or on repeats. Raises `InputRefused` (H220) with every spec for
    which there is no kernel.
    """
    distinct = tuple(sorted(set(specs), key=lambda spec: spec.entry))
    faults = [fault for spec in distinct if (fault := kind_of(spec).unsupported(spec))]
    if faults:
        raise InputRefused(*faults)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.templates()),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    units = [_kernel(environment, spec, origin.get(spec, "none")) for spec in distinct]
    interfaces = {spec: kind_of(spec).interface or spec.op for spec in distinct}
    bindings = environment.get_template("bindings.cpp.j2").render(specs=distinct, interfaces=interfaces)
    units.append(TranslationUnit("bindings.cpp", bindings, "scalar"))
    units.extend(_of_runtime(path) for path in _runtime_units(distinct))
    return KernelSource(tuple(units), distinct)


def _runtime_units(specs: Sequence[Spec]) -> Iterator[Path]:
    """Yield the files of C++ that a library with these kernels has as they are."""
    yield resources.runtime_sources() / "interface.cpp"
    yield resources.runtime_bindings() / "module.cpp"
    more = (kind_of(spec).unit for spec in specs)
    yield from (resources.runtime_bindings() / unit for unit in dict.fromkeys(more) if unit)


def _of_runtime(path: Path) -> TranslationUnit:
    return TranslationUnit(path.name, path.read_text(encoding="utf-8"), "scalar")


def _kernel(environment: jinja2.Environment, spec: Spec, origin: str) -> TranslationUnit:
    text = ", ".join(f"{field.name}={getattr(spec, field.name)}" for field in fields(spec))
    rendered = environment.get_template(f"{spec.op}.cpp.j2").render(
        spec=spec,
        spec_lines=textwrap.wrap(f"{type(spec).__name__}: {text}", _COMMENT_WIDTH),
        origin=_UNSAFE.sub("_", origin),
        **kind_of(spec).choices(spec),
    )
    return TranslationUnit(f"{spec.entry}.cpp", rendered, spec.isa)
