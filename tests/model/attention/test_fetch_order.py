"""What kernels of attention fetch ahead of their use: a wrong address or number would change no output."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ktc.foundation import host
from ktc.stages.codegen import toolchain

PROGRAM = Path(__file__).parent / "fetch_order.cpp"


def test_each_line_is_fetched_once_in_time_and_in_the_order_of_reading(tmp_path: Path) -> None:
    tools = toolchain.find(host.detect())
    program = tmp_path / "fetch_order"
    includes = [f"-I{each}" for each in tools.include]
    subprocess.run([tools.compiler.path, "-std=c++20", "-O1", *includes, str(PROGRAM), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
