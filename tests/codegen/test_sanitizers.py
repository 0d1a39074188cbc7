"""The kernels under the sanitizers of the compiler: no data race, no access out of bounds, no undefined behaviour.

`make sanitize` runs this alone; `make test-all` includes it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ktc import host
from ktc.codegen import toolchain

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent / "sanitizers" / "stress.cpp"
# A child of a process with threads starts threads of its own; what the workspace keeps is no leak.
OPTIONS = {
    "thread": ("-fsanitize=thread", {"TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1"}),
    "address,undefined": (
        "-fsanitize=address,undefined",
        {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    ),
}


@pytest.mark.parametrize("sanitizer", OPTIONS)
def test_nothing_is_found(sanitizer: str, tmp_path: Path) -> None:
    here = host.detect()
    isa = here.isas[0]
    program = tmp_path / "stress"
    tools = toolchain.find(here)
    flag, environment = OPTIONS[sanitizer]
    flags = [each for each in tools.flags(isa, SOURCE.name) if each not in ("-O3", "-fPIC")]
    headers = (flag for name in (isa, f"{isa}_int8") for flag in ("-include", f"ktc/isa/{name}.hpp"))
    includes = [*(f"-I{folder}" for folder in tools.include), *headers, f"-DKTC_ISA={isa}"]
    build = [tools.compiler.path, *flags, "-O1", "-g", flag, "-fno-sanitize-recover=all", *includes, str(SOURCE)]
    subprocess.run([*build, "-o", str(program)], check=True)
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "all the same\n"), done.stderr[-4000:]
