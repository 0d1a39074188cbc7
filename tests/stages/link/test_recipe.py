"""The steps that a program leads to are those that the manifest's reader takes: every argument in its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc import compiler
from ktc.model.manifest.manifest import _step_faults
from ktc.stages.rewrite import linear_steps, recipe

PROGRAMS = {
    "latents in one product": ("deepseek_v2", "match attn.mla => mla_absorbed(move_elision = false)"),
    "sparse latents": ("deepseek_v2", "match attn.mla => sparse_attention(k = 64)"),
    "sparse": ("qwen3_moe", "match attn.gqa => sparse_attention(k = 64, sink = 0, local = 0)"),
}


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        pytest.param(*program, id=name, marks=() if name.startswith("sparse") else pytest.mark.slow)
        for name, program in PROGRAMS.items()
    ],
)
def test_every_step_of_a_program_is_read_again(family: str, rule: str, tmp_path: Path) -> None:
    program = tmp_path / "program.ktr"
    program.write_text(f'import "std/attention.ktr" as attn\nrule only {{ {rule} }}\n')
    found = compiler.analyse(f"tiny:{family}", program)
    steps = (*recipe(found.blocks, found.host), *linear_steps(found.plan))
    entries = {spec.entry for spec in found.plan.kernels}
    assert steps
    assert [fault for step in steps for fault in _step_faults(step, entries)] == []
