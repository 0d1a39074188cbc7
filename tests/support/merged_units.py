"""The kernels of one instruction set as one translation unit: they share their headers and most of their products.

Nine kernels compile in the time of four. The product compiles one unit per kernel, on all cores, as
`tests/end_to_end` and `built` of `kernel_layers` do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ktc.foundation.isa import Isa
from ktc.stages.codegen.render import KernelSource, TranslationUnit

_ENTRY = re.compile(r"^const (?P<type>ktc::\w+) (?P<name>entry_\w+)\{", re.MULTILINE)
_INCLUDE, _UNIT = "#include ", "#define KTC_UNIT "


def merged(source: KernelSource) -> KernelSource:
    """The same kernels in one unit per instruction set. The units that every library has stay as they are."""
    kernels = {spec.entry + ".cpp" for spec in source.specs}
    by_isa: dict[Isa, list[TranslationUnit]] = {}
    for unit in source.units:
        if unit.name in kernels:
            by_isa.setdefault(unit.isa, []).append(unit)
    units = [TranslationUnit(f"kernels_{isa}.cpp", _text(isa, units), isa) for isa, units in by_isa.items()]
    return replace(source, units=(*units, *(unit for unit in source.units if unit.name not in kernels)))


def _text(isa: Isa, units: Sequence[TranslationUnit]) -> str:
    """All includes, then each unit in a namespace of its own, whose entry is made global."""
    lines = [line for unit in units for line in unit.text.splitlines()]
    includes = dict.fromkeys(line for line in lines if line.startswith(_INCLUDE))
    parts = ["// Merged kernels.", f"{_UNIT}kernels_{isa}", *includes]
    for number, unit in enumerate(units):
        body = "\n".join(line for line in unit.text.splitlines() if not line.startswith((_INCLUDE, _UNIT)))
        found = _ENTRY.search(body)
        assert found is not None, unit.name
        space, kind, name = f"unit_{number}", found["type"], found["name"]
        parts += [f"namespace {space} {{", body, "}", f"extern const {kind} {name};"]
        parts.append(f"const {kind} {name} = {space}::{name};")
    return "\n".join(parts) + "\n"
