"""The native unit tests of the runtime: operations that no call from Python reaches alone, per instruction set.

`units/` holds the programs' tests. A program is built for each instruction set that this machine runs, and its results
are compared with plain C++. A misspelled member of an instruction set does not compile.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kernel_layers import ISAS

from ktc.foundation import host, resources
from ktc.foundation.formats import FORMATS, Dense
from ktc.foundation.isa import INSTRUCTION_SETS, Isa
from ktc.stages.codegen import toolchain

SOURCES = Path(__file__).parent / "units"
UNITS = ("lanes", "products", "sweep", "decoders", "mailbox", "host_call")
# Panels of every format but those of plain numbers; of codes with a choice of groups, those of 64.
CODED = [row.panel for row in FORMATS.values() if row.panel and not isinstance(row, Dense)]
PANELS = ",".join(f"ktc::weight_format::{panel.type.format(64)}" for panel in CODED)
CONSTANTS = ("kWordRows", "kCodeRows", "kNumberRows", "kBf16Products", "kStreamRows", "kBlocked", "kFp32Halves")
QUICK = [(ISAS[0], unit) for unit in UNITS if unit != "decoders"]
SLOW = [(isa, unit) for isa in ISAS for unit in UNITS if (isa, unit) not in QUICK]


def compiler(isa: Isa, unit: str) -> list[str]:
    tools = toolchain.find(host.detect())
    includes = [f"-I{folder}" for folder in (*tools.include, SOURCES)]
    element = INSTRUCTION_SETS[isa].cxx_type("ktc::bf16")
    return [
        tools.compiler.path,
        *tools.flags(isa, f"{unit}.cpp"),
        *includes,
        f"-DKTC_UNIT={unit}",
        f"-DKTC_ISA={element}",
    ]


def compiled(isa: Isa, unit: str, source: Path, folder: Path) -> Path:
    headers = [f"ktc/isa/{isa}{kind}.hpp" for kind in ("", "_int8", "_key_dots", "_cache_codes")]
    headers = [header for header in headers if (resources.runtime_include() / header).is_file()]
    headers += sorted({f"ktc/weight_format/{panel.header}.hpp" for panel in CODED})
    included = [flag for header in headers for flag in ("-include", header)]
    target = folder / f"{unit}.o"
    command = [*compiler(isa, unit), *included, f"-DKTC_PANELS={PANELS}", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


@pytest.mark.parametrize(
    ("isa", "unit"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_every_operation_is_that_of_plain_code(isa: Isa, unit: str, tmp_path: Path) -> None:
    sources = {unit: SOURCES / f"{unit}.cpp", "main": SOURCES / "main.cpp"}
    objects = [compiled(isa, name, source, tmp_path) for name, source in sources.items()]
    objects.append(compiled("scalar", "interface", resources.runtime_sources() / "interface.cpp", tmp_path))
    program = tmp_path / "program"
    subprocess.run([toolchain.find(host.detect()).compiler.path, "-pthread", *objects, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.startswith(f"{unit}: ") for line in done.stdout.splitlines())
    assert done.stdout.count("\n") == (SOURCES / f"{unit}.cpp").read_text().count("const Test ")


@pytest.mark.parametrize(
    "name", [CONSTANTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CONSTANTS[1:])]
)
def test_a_misspelled_constant_of_an_instruction_set_does_not_compile(name: str, tmp_path: Path) -> None:
    source = tmp_path / "misspelled.cpp"
    for spelling, status in ((name, 0), (f"{name}Misspelt", 1)):
        lines = ('#include "ktc/concepts.hpp"', f"#define {name} {spelling}", '#include "ktc/isa/scalar.hpp"')
        source.write_text("\n".join(lines) + "\n")
        command = [*compiler("scalar", "misspelled"), "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert re.search(rf"concepts.hpp:.*::{name}.* is invalid", done.stderr)
