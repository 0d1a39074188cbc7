"""`kv = int8` in a program: kernels, bytes and reasons, and what keeps the model's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import captured, planned, rules

from ktc.diagnostics import InputRefused
from ktc.stages.plan.types import Plan

EXPERTS = "rule e { match moe.block => cpu_moe() }\n"


def plan_of(family: str, action: str, tmp_path: Path, more: str = "") -> Plan:
    program = f"{EXPERTS}rule a {{ match attn.{action} }}\n{more}"
    return planned(captured(family), rules(program, tmp_path))[1]


@pytest.mark.parametrize(("family", "action"), [
    ("qwen3_moe", "gqa => fused_attention(flash_decode{})"),
    ("deepseek_v2", "mla => mla_absorbed(kernel = flash_decode{})"),
])  # fmt: skip
def test_a_cache_of_codes_takes_half_of_the_bytes(family: str, action: str, tmp_path: Path) -> None:
    plain = plan_of(family, action.format(""), tmp_path)
    coded = plan_of(family, action.format(", kv = int8"), tmp_path)
    assert "attention" in {spec.op for spec in plain.kernels}
    assert {"attention", "int8_attention"} & {spec.op for spec in coded.kernels} == {"int8_attention"}
    assert any("keys and values as int8 codes" in reason.text for reason in coded.reasons)
    assert not coded.warnings


def test_a_kernel_that_reads_no_codes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"M087.*kernel = sdpa") as refused:
        plan_of("deepseek_v2", "mla => mla_absorbed(kv = int8)", tmp_path)
    assert refused.value.diagnostics[0].span is not None


def test_native_steps_do_not_read_codes(tmp_path: Path) -> None:
    more = 'rule all { match module at "*" => place(cpu) }\nplan { mode = infer  native_step = decode }\n'
    plan = plan_of("qwen3_moe", "gqa => fused_attention(flash_decode, kv = int8)", tmp_path, more)
    assert [warning.code for warning in plan.warnings] == ["M084"]
