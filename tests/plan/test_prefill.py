"""`place(cpu, prefill = D)` on experts: planned with its number of tokens, told, and refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from families import CPU, captured, planned, rules

from ktc.diagnostics import HostLacks, InputRefused
from ktc.host import Gpu, Host
from ktc.plan import Plan
from ktc.rewrite import recipe, rewrite

GPU = replace(CPU, gpus=(Gpu("test", 24 << 30),))
MANY = "rule many { match moe.opaque as m => place(cpu, prefill = cuda:0) on m.experts }\n"
EXPERTS = "rule experts { match moe.block => cpu_moe() }\n"


def plan_of(text: str, folder: Path, host: Host = GPU) -> Plan:
    return planned(captured("deepseek_v2"), rules(text, folder), host)[1]


@pytest.mark.parametrize(("extra", "tokens"), [("", 1024), ("plan { layerwise_prefill = 300 }", 300)])
def test_calls_with_many_tokens_go_to_the_gpu_and_the_experts_stay(extra: str, tokens: int, tmp_path: Path) -> None:
    plan = plan_of(EXPERTS + MANY + extra, tmp_path)
    assert plan.unavailable == ()
    assert {p.fqn for p in plan.placements} == {""}  # nothing lies elsewhere
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert steps
    assert all(
        (step.device, step.args["prefill"], step.args["prefill_tokens"]) == ("cpu", "cuda:0", tokens) for step in steps
    )
    assert any(f"from {tokens} tokens on cuda:0, where the weights are sent" in reason.text for reason in plan.reasons)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_gpu_everything_stays_with_the_kernel(device: str, tmp_path: Path) -> None:
    plan = plan_of(EXPERTS + MANY.replace("cuda:0", device), tmp_path, CPU)
    assert plan.unavailable == ()
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert {step.args["prefill"] for step in steps} == {""}


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostLacks, match=r"prefill = cuda:0"):
        plan_of(EXPERTS + MANY, tmp_path, CPU)


def test_weights_that_are_cut_for_numa_nodes_are_refused_once(tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refusal:
        plan_of(EXPERTS + MANY, tmp_path, replace(GPU, numa=2))
    (problem,) = refusal.value.diagnostics
    assert problem.code == "M078"
    assert "several NUMA nodes" in problem.message


def test_weights_in_codes_are_sent_as_they_are_stored(tmp_path: Path) -> None:
    plan = plan_of(EXPERTS.replace("cpu_moe()", "cpu_moe(format = int8)") + MANY, tmp_path)
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert {step.args["prefill"] for step in steps} == {"cuda:0"}


def test_a_number_of_tokens_without_experts_that_go_elsewhere_is_told(tmp_path: Path) -> None:
    (told,) = plan_of(EXPERTS + "plan { layerwise_prefill = 300 }", tmp_path).unavailable
    assert told.code == "M066"
    assert "has no effect" in told.message
