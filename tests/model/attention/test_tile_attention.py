"""Attention by AMX tiles on processors that have none: the tile instructions are software."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from software_tiles import HEADER

from ktc.foundation import host, resources
from ktc.stages.codegen import toolchain

PROGRAM = Path(__file__).parent / "tile_attention.cpp"


@pytest.mark.skipif("avx512_bf16" not in host.detect().isas, reason="needs AVX512-BF16: only tiles are software")
@pytest.mark.usefixtures("optimised")  # at -Og the program takes four times as long
def test_tiles_compute_what_avx512_bf16_does(tmp_path: Path) -> None:
    tools = toolchain.find(host.detect())
    tools = replace(tools, include=(*tools.include, HEADER.parent))
    program = tmp_path / PROGRAM.stem
    sources = (PROGRAM, resources.runtime_sources() / "interface.cpp")
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    for source, compiled in zip(sources, objects, strict=True):
        subprocess.run(tools.compile_command(source, compiled, "avx512_bf16"), check=True)
    subprocess.run([tools.compiler.path, "-pthread", *map(str, objects), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
