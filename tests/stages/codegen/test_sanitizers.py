"""The kernels under the sanitizers of the compiler: no data race, no access out of bounds, no undefined behaviour.

Every kernel of every instruction set, as the product generates it: experts in every weight format and form, linear
layers, attention, routers, and decoding steps. `make sanitize` runs this alone; `make test-all` includes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest
from every_kernel import every_spec
from kernel_layers import ISAS

from ktc.foundation import host, resources
from ktc.foundation.formats import FORMATS, Blocks, Codes, Exponent, Float8Scales, Halves, ScaleAndZero, WeightFormat
from ktc.foundation.isa import PREFERENCE, Isa
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.kernels.router_spec import RouterSpec
from ktc.model.kernels.spec import Spec
from ktc.stages.codegen import toolchain
from ktc.stages.codegen.kinds import KINDS
from ktc.stages.codegen.render import render
from ktc.stages.codegen.toolchain import Toolchain

pytestmark = pytest.mark.slow

SOURCES = Path(__file__).parent / "sanitizers"
PROGRAM = ("stress.cpp", "moe.cpp", "linear.cpp", "attention.cpp", "router.cpp", "step.cpp")
# A child of a process with threads starts threads of its own; what the workspace keeps is no leak.
OPTIONS = {
    "thread": {"TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1"},
    "address,undefined": {
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
}
ELEMENTS = {"bf16": "kBf16", "fp16": "kFp16", "fp32": "kFp32", "fp64": "kFp64"}


def facts(spec: Spec) -> dict[str, Any]:
    """What `Facts` of `calls.hpp` holds for a kernel."""
    found = {"element": ELEMENTS[spec.dtype], "gated": "true", "biased": "false", "first": (), "down": ()}
    found |= {"whole_hidden": 1, "whole_intermediate": 1, "weights": "kFp32", "experts": 0, "top_k": 0}
    if isinstance(spec, FusedMoeSpec):
        found |= {"gated": str(spec.gated).lower(), "biased": str(spec.biased).lower()}
        found |= {"first": stored(spec.format_gate_up), "down": stored(spec.format_down)}
        found |= {"whole_hidden": whole(spec, spec.format_gate_up), "whole_intermediate": whole(spec, spec.format_down)}
    if isinstance(spec, PackedLinearSpec):
        found |= {"first": stored(spec.weight_format)}
    if isinstance(spec, RouterSpec):
        found |= {"weights": ELEMENTS[spec.form.dtypes(spec.hidden)["weights"]], "experts": spec.form.num_experts}
        found |= {"top_k": spec.form.top_k, "biased": str(spec.form.corrected).lower()}
    return found


def whole(spec: FusedMoeSpec, name: WeightFormat) -> int:
    row = FORMATS[name]
    return spec.group_of(name) if isinstance(row, Codes) and row.even else row.whole


def stored(name: WeightFormat) -> tuple[int, ...]:
    """Weights and bytes of a block, and where its scale, minimum, exponent, zero point and scale of a matrix are."""
    row = FORMATS[name]
    if not isinstance(row, Blocks):
        return ()
    scale = minimum = exponent = scale_and_zero = -1
    if isinstance(row.scales, Halves):
        scale, minimum = row.scales.scale, -1 if row.scales.minimum is None else row.scales.minimum
    elif isinstance(row.scales, Exponent):
        exponent = row.scales.at
    elif isinstance(row.scales, ScaleAndZero):
        scale_and_zero = row.scales.at
    of_matrix = (row.scales.matrix, row.scales.at) if isinstance(row.scales, Float8Scales) else ()
    return row.weights, row.block_bytes, scale, minimum, exponent, scale_and_zero, *of_matrix


def built(specs: tuple[Spec, ...], isa: Isa, sanitizer: str, folder: Path) -> Path:
    """Compile the generated kernels, each with the flags of its instruction set, and the program that runs them."""
    tools = toolchain.find(host.detect())
    template = jinja2.Template((SOURCES / "kernels.cpp.j2").read_text(), undefined=jinja2.StrictUndefined)
    rows, interfaces = [(spec, facts(spec)) for spec in specs], {op: kind.interface or op for op, kind in KINDS.items()}
    (folder / "kernels.cpp").write_text(template.render(rows=rows, interfaces=interfaces) + "\n")
    kernels = [unit for unit in render(specs, {}).units if unit.isa == isa and unit.name.startswith(entries(specs))]
    for unit in kernels:
        (folder / unit.name).write_text(unit.text)
    units = [(folder / unit.name, isa) for unit in kernels]
    program = (folder / "kernels.cpp", *(SOURCES / name for name in PROGRAM))
    units += [(path, "scalar") for path in (resources.runtime_sources() / "interface.cpp", *program)]
    with ThreadPoolExecutor(host.usable_threads()) as pool:
        objects = list(pool.map(lambda unit: compiled(tools, *unit, sanitizer, folder), units))
    built = folder / "stress"
    subprocess.run([tools.compiler.path, "-pthread", f"-fsanitize={sanitizer}", *objects, "-o", built], check=True)
    return built


def entries(specs: tuple[Spec, ...]) -> tuple[str, ...]:
    return tuple(f"{spec.entry}.cpp" for spec in specs)


def compiled(tools: Toolchain, source: Path, isa: Isa, sanitizer: str, folder: Path) -> Path:
    target = (folder / source.name).with_suffix(".o")
    flags = [each for each in tools.flags(isa, source.name) if each not in ("-O1", "-O3", "-fPIC")]
    checks = ("-O1", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    includes = (f"-I{each}" for each in (*tools.include, SOURCES))
    command = [tools.compiler.path, *flags, *checks, *includes, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def at_fixed_addresses() -> list[str]:
    """The thread sanitizer of GCC cannot start where the system spreads addresses too widely."""
    setarch = shutil.which("setarch")
    prefix = [setarch, "--addr-no-randomize"] if setarch else []
    works = prefix and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if works else []


@pytest.mark.parametrize("sanitizer", OPTIONS)
@pytest.mark.parametrize("isa", PREFERENCE)
def test_nothing_is_found(isa: Isa, sanitizer: str, tmp_path: Path) -> None:
    if isa not in ISAS:
        pytest.skip(f"this machine cannot run `{isa}` kernels")
    specs = every_spec(isa)
    program = built(specs, isa, sanitizer, tmp_path)
    shares = host.usable_threads()
    environment = {**os.environ, **OPTIONS[sanitizer]}

    def run(share: int) -> str:
        command = [*at_fixed_addresses(), str(program), str(share), str(shares)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    with ThreadPoolExecutor(shares) as pool:
        lines = "".join(pool.map(run, range(shares))).splitlines()
    calls = {name: int(count.split()[0]) for name, _, count in (line.partition(": ") for line in lines)}
    assert set(calls) == {spec.entry for spec in specs}
    print(f"{isa}, {sanitizer}: {len(calls)} kernels, {sum(calls.values())} calls")
