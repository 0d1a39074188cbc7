"""Attention by AMX tiles on processors that have none: the tile instructions are software."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from software_tiles import HEADER

from ktc import host
from ktc.codegen import toolchain
from ktc.isa import INSTRUCTION_SETS

PROGRAM = Path(__file__).parent / "tile_attention.cpp"


@pytest.mark.skipif("avx512_bf16" not in host.detect().isas, reason="needs AVX512-BF16: only tiles are software")
def test_tiles_compute_what_avx512_bf16_does(tmp_path: Path) -> None:
    tools = toolchain.find(host.detect())
    program = tmp_path / "tile_attention"
    includes = [f"-I{each}" for each in (*tools.include, HEADER.parent)]
    options = ["-std=c++20", "-O2", "-pthread", *INSTRUCTION_SETS["avx512_bf16"].compiler, *includes]
    subprocess.run([tools.compiler.path, *options, str(PROGRAM), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
