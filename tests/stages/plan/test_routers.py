"""Routers under `fused`: the routing that is read from each family, and the routers that keep their own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from families import CPU, captured, planned, rules
from invented.registered.models import MODELS

import ktc
from ktc.diagnostics import InputRefused
from ktc.foundation.host import Gpu
from ktc.model import twin
from ktc.model.kernels.router_spec import RouterForm, RouterSpec
from ktc.stages.capture import ModelSource, capture
from ktc.stages.capture.circumstances import circumstances_checked
from ktc.stages.plan import Plan

FUSED = "rule route { match moe.block as m => fused on m.router }"
OPTIONAL = "rule route { match moe.block as m  expect >= 0  => fused on m.router }"
EXPERTS = "rule experts { match moe.block => cpu_moe() }"
FORMS = {
    "deepseek_v2": RouterForm(
        16, 4, "softmax", groups=4, top_groups=2, limited=0.0, takes_limited=True, in_order=False, logits="fp32"
    ),
    "deepseek_v3": RouterForm(
        16, 4, "sigmoid", corrected=True, groups=4, top_groups=2, group_score="two_greatest", total="plus",
        total_constant=1e-20, scale=2.5, in_order=False, logits="fp32",
    ),
    "gpt_oss": RouterForm(8, 2, "softmax", late=True),
    "qwen3_moe": RouterForm(8, 2, "softmax", total="plus", scores="fp32", weights="hidden"),
}  # fmt: skip
# Families with routed experts whose routing `std/moe.ktr` does not describe.
UNKNOWN = frozenset({
    "dbrx", "doge", "gemma4_text", "inkling_text", "jetmoe", "llama4_text", "longcat_flash", "phimoe", "zaya",
})  # fmt: skip


def specs_of(plan: Plan) -> list[RouterSpec]:
    return [cast("RouterSpec", spec) for spec in plan.kernels if spec.op == "router"]


@pytest.mark.parametrize("family", FORMS)
def test_the_routing_of_a_family_is_read(family: str, tmp_path: Path) -> None:
    _, plan = planned(captured(family), rules(FUSED, tmp_path))
    assert [spec.form for spec in specs_of(plan)] == [FORMS[family]]
    (reason,) = [reason for reason in plan.reasons if "the rest by the avx512_bf16 kernel" in reason.text]
    assert reason.path.endswith(("mlp.gate", "mlp.router"))
    assert {action.fqn for each in plan.rewrites for action in each.actions} <= {"gate", "router"}


def test_a_router_and_its_experts_are_rewritten_in_one_block(tmp_path: Path) -> None:
    program = rules(f"{FUSED} {EXPERTS}", tmp_path)
    _, plan = planned(captured("deepseek_v3"), program)
    (rewrite,) = plan.rewrites
    assert sorted(action.target.name for action in rewrite.actions) == ["cpu_moe", "fused"]


def test_auto_is_for_routers_on_a_gpu(tmp_path: Path) -> None:
    host = replace(CPU, gpus=(Gpu("NVIDIA H200", 141 << 30),))
    text = """rule route { match moe.block as m => fused(auto) on m.router }
              rule all { match module at "*" => place(DEV) }"""
    model = captured("deepseek_v2")
    _, there = planned(model, rules(f"{text.replace('DEV', 'cuda:0')} {EXPERTS}", tmp_path), host)
    _, here = planned(model, rules(f"{text.replace('DEV', 'cpu')} {EXPERTS}", tmp_path), host)
    assert (len(specs_of(there)), len(specs_of(here))) == (1, 0)


@pytest.mark.parametrize("name", MODELS)
def test_a_routing_in_the_code_of_the_block_stays(name: str, tmp_path: Path) -> None:
    config = MODELS[name]()
    config.dtype = torch.float32
    model = capture(ModelSource(name, None, config, None))
    with pytest.raises(InputRefused, match=r"M095.*in the code of the block"):
        planned(model, rules(FUSED, tmp_path))
    program = rules(f"{OPTIONAL} rule e {{ match moe.block => cpu_moe(bf16) }}", tmp_path)
    _, plan = planned(model, program)
    assert [warning.code for warning in plan.warnings if warning.code[0] == "M"] == ["M095"]
    assert specs_of(plan) == []


def test_a_router_in_a_dtype_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"M095.*the model is float64"):
        planned(captured("qwen3_moe", torch.float64), rules(FUSED, tmp_path), CPU)


def test_a_router_on_a_gpu_is_routed_there(tmp_path: Path) -> None:
    host = replace(CPU, gpus=(Gpu("test", 24 << 30),))
    program = rules(f'{FUSED} rule all {{ match module at "model" => place(cuda:0) }}', tmp_path)
    _, plan = planned(captured("qwen3_moe", torch.bfloat16), program, host)
    assert specs_of(plan)
    assert any("by a kernel of the GPU, of others by PyTorch, on cuda:0" in reason.text for reason in plan.reasons)


@pytest.mark.full
@pytest.mark.parametrize("family", twin.moe_families())
def test_every_family_with_a_known_routing_is_rewritten_and_proven(family: str, tmp_path: Path) -> None:
    program = tmp_path / "router.ktr"
    program.write_text(f'import "std/moe.ktr"\n{OPTIONAL}\nrule e {{ match moe.block  expect >= 0  => cpu_moe() }}')
    if family in UNKNOWN:
        with pytest.raises(InputRefused), circumstances_checked():
            ktc.inspect(f"tiny:{family}", program, host=CPU)
        return
    with circumstances_checked():
        report = ktc.inspect(f"tiny:{family}", program, host=CPU)
    assert specs_of(report.plan)
    assert all(proof.holds for proof in report.proofs)
    assert not [warning for warning in report.plan.warnings if warning.code in ("M095", "P300", "P301")]
