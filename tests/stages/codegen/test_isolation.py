"""The units of a library share no code: a scalar kernel runs scalar instructions, whatever it is linked with."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from every_kernel import every_spec
from kernel_layers import ISAS, spec_of
from routers import FORMS
from routers import spec_of as router_spec

from ktc.foundation import host
from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.kernels.linear_spec import LinearSpec
from ktc.model.kernels.spec import Spec
from ktc.model.kernels.step_spec import StepSpec
from ktc.stages.codegen import toolchain
from ktc.stages.codegen.render import TranslationUnit, render

_FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>[^>]+)>:$")
_VECTOR = re.compile(r"%[yz]mm")


@dataclass(frozen=True)
class Linked:
    """A library and the objects that it was linked from, each with its unit."""

    library: Path
    objects: dict[Path, TranslationUnit]

    @property
    def scalar(self) -> list[Path]:
        return [path for path, unit in self.objects.items() if unit.isa == "scalar"]


def linked(specs: Sequence[Spec], folder: Path) -> Linked:
    tools = toolchain.find(host.detect())

    def compiled(unit: TranslationUnit) -> Path:
        source = folder / unit.name
        source.write_text(unit.text)
        subprocess.run(tools.compile_command(source, source.with_suffix(".o"), unit.isa), check=True)
        return source.with_suffix(".o")

    units = render(specs, {}).units
    with ThreadPoolExecutor(host.usable_threads()) as pool:
        objects = dict(zip(pool.map(compiled, units), units, strict=True))
    library = folder / "library.so"
    subprocess.run(tools.link_command(objects, library), check=True)
    return Linked(library, objects)


def weak_functions(path: Path) -> set[str]:
    """The names, as the linker has them, of functions that another unit may define too."""
    done = subprocess.run(["nm", "--defined-only", path], check=True, capture_output=True, text=True)
    rows = (line.split() for line in done.stdout.splitlines())
    return {row[2] for row in rows if len(row) == 3 and row[1] in "Wu"}


def vector_functions(path: Path) -> set[str]:
    """The names of functions with instructions on registers of more than 128 bits."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", path]
    name, found = "", set[str]()
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        if match := _FUNCTION.match(line):
            name = match["name"]
        elif _VECTOR.search(line):
            found.add(name)
    return found


def one_of_each_kind() -> Iterator[Spec]:
    """Specs that other quick tests build too."""
    two = (ISAS[0], "scalar")
    yield from (spec_of(isa) for isa in ISAS)
    yield from (LinearSpec("linear", "bf16", isa) for isa in two)
    yield from (AttentionSpec("attention", "bf16", isa) for isa in two)
    yield from (StepSpec("step", "fp32", isa) for isa in two)
    yield from (router_spec(FORMS["deepseek_v3"], "bf16", isa) for isa in two)


def check(found: Linked) -> None:
    owners = defaultdict(list)
    for path in found.objects:
        for name in weak_functions(path):
            owners[name].append(path.name)
    shared = {name: units for name, units in owners.items() if len(units) > 1 and "3ktc" in name}
    assert shared == {}
    assert INSTRUCTION_SETS["scalar"].compiler == ()
    for path in found.scalar:
        assert vector_functions(path) == set(), path.name
    # What scalar units share with others is of the C++ library, and the linker may have taken it from any of them.
    reached = set[str]().union(*(weak_functions(path) for path in found.scalar))
    assert reached & vector_functions(found.library) == set()


def test_units_share_no_code_of_ktc_and_scalar_ones_run_scalar_code(tmp_path: Path) -> None:
    check(linked(tuple(one_of_each_kind()), tmp_path))


@pytest.mark.slow
def test_all_instruction_sets_and_formats_share_no_code(tmp_path: Path, optimised: None) -> None:
    check(linked(tuple(spec for isa in ISAS for spec in every_spec(isa)), tmp_path))
