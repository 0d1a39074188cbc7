"""Adapters on routed experts: which weights a program names, what they cost, and what cannot be adapted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from families import captured as capture_family
from families import planned, rules

from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.working_memory import slots_of
from ktc.stages.capture import CapturedModel, ModelSource, capture
from ktc.stages.link.adapter import adapter_json
from ktc.stages.plan.types import Plan

MOE = 'import "std/moe.ktr"\n'


@cache
def captured(family: str) -> CapturedModel:
    return capture_family(family)


def plan_of(text: str, folder: Path, family: str = "qwen3_moe") -> Plan:
    return planned(captured(family), rules(text, folder))[1]


def refused(text: str, folder: Path, family: str = "qwen3_moe") -> str:
    with pytest.raises(InputRefused, match="M076") as error:
        plan_of(text, folder, family)
    return str(error.value)


def test_the_weights_of_the_experts_are_named_and_counted(tmp_path: Path) -> None:
    plan = plan_of("rule r { match moe.block => cpu_moe() => lora_experts(rank = 3) }", tmp_path)
    assert plan.lora is not None
    assert plan.lora.targets == ()
    assert plan.lora.parameters[:2] == (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    )
    (kernel,) = plan.kernels
    assert None not in (kernel.num_experts, kernel.hidden, kernel.intermediate)
    experts, hidden, inter = kernel.num_experts or 0, kernel.hidden or 0, kernel.intermediate or 0
    layers = len(plan.lora.parameters) // 2
    trainable = layers * experts * 3 * ((hidden + 2 * inter) + (inter + hidden))
    assert plan.lora.trainable == trainable
    (cpu,) = plan.devices
    assert cpu.adapter == 16 * trainable  # fp32 masters, their gradients, two moments of Adam


def test_ranks_of_their_own_stand_beside_those_of_linear_layers(tmp_path: Path) -> None:
    text = """
    rule experts { match moe.block => cpu_moe() => lora_experts(rank = 4, alpha = 8, targets = [down]) }
    rule linears { match linear at "**.q_proj" => lora_linear() }
    lora { rank = 8  alpha = 32 }
    """
    lora = plan_of(text, tmp_path).lora
    assert lora is not None
    assert {path.rpartition(".")[2] for path in lora.parameters} == {"down_proj"}
    assert lora.rank_pattern == dict.fromkeys(lora.parameters, 4)
    config = adapter_json(lora)
    assert config["target_parameters"] == list(lora.parameters)
    assert config["alpha_pattern"] == dict.fromkeys(lora.parameters, 8.0)
    assert (config["r"], config["lora_dropout"]) == (8, 0.0)


def test_experts_without_a_gate_are_adapted_by_up_and_down(tmp_path: Path) -> None:
    config = twin.shrink(twin.default_config("nemotron_h"))
    config.dtype = torch.bfloat16
    program = rules("rule r { match moe.block => cpu_moe() => lora_experts(rank = 3) }", tmp_path)
    lora = planned(capture(ModelSource("nemotron_h", None, config, None)), program)[1].lora
    assert lora is not None
    assert [path.rpartition(".")[2] for path in lora.parameters] == ["up_proj", "down_proj"]


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8"])
def test_the_format_of_the_base_changes_nothing_about_its_adapters(tmp_path: Path, format: str) -> None:
    plan = plan_of(f"rule r {{ match moe.block => cpu_moe(format = {format}) => lora_experts(rank = 3) }}", tmp_path)
    bare = plan_of(f"rule r {{ match moe.block => cpu_moe(format = {format}) }}", tmp_path)
    assert plan.lora is not None
    (adapted,), (frozen,) = plan.devices, bare.devices
    assert adapted.weights == frozen.weights
    assert (frozen.adapter, adapted.adapter) == (0, 16 * plan.lora.trainable)


@pytest.mark.parametrize(("activations", "how"), [("keep", "are kept"), ("recompute", "are computed again")])
def test_a_plan_says_what_a_token_leaves_for_backward(tmp_path: Path, activations: str, how: str) -> None:
    action = f"cpu_moe(activations = {activations}) => lora_experts(rank = 3)"
    plan = plan_of(f"rule r {{ match moe.block => {action} }}", tmp_path)
    (kernel,) = plan.kernels
    slots = {each: slots_of(kernel, keep=each == "keep", ranks=(3, 3)).saved for each in ("keep", "recompute")}
    (why,) = [reason.text for reason in plan.reasons if "wait for backward" in reason.text]
    assert why.startswith(f"{slots[activations]:,} bytes per token and layer wait for backward: gate and up {how}")
    (other,) = slots.keys() - {activations}
    assert why.endswith(f"(`activations = {other}`: {slots[other]:,})")
    (adapted,) = [reason.text for reason in plan.reasons if "take LoRA" in reason.text]
    assert "gate_up_proj (r=3) and down_proj (r=3)" in adapted


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("cpu_moe() => lora_experts(rank = 200)", "rank 200, of which the kernels take 128"),
        ("cpu_moe() => lora_experts(targets = [gate])", "gate and up are one weight"),
        ("lora_experts()", "no rule with `cpu_moe`"),
    ],
)
def test_what_cannot_be_adapted_is_refused_with_a_reason(tmp_path: Path, action: str, why: str) -> None:
    text = f"rule r {{ match moe.block => {action} }}\nlora {{ rank = 8 }}"
    assert why in refused(text, tmp_path)


def test_dropout_is_planned_with_its_memory(tmp_path: Path) -> None:
    rule = "rule r { match moe.block => cpu_moe() => lora_experts() }"
    plain, dropped = (plan_of(f"{rule}\nlora {{ rank = 8  dropout = {p} }}", tmp_path) for p in (0, 0.1))
    assert plain.lora is not None and dropped.lora is not None
    config = adapter_json(dropped.lora)
    assert (config["lora_dropout"], config["target_parameters"]) == (0.1, list(plain.lora.parameters))
    (kernel,) = dropped.kernels
    for keep in (True, False):
        without, with_it = (slots_of(kernel, keep=keep, ranks=(8, 8), dropout=each) for each in (False, True))
        assert without.saved == with_it.saved
        assert without.forward(64) < with_it.forward(64)
        assert without.backward(64) < with_it.backward(64)


def test_experts_in_a_list_are_refused_and_told_why(tmp_path: Path) -> None:
    stacked = captured("qwen3_moe")
    listed = [replace(m, tensors=()) if m.fqn.endswith(".experts") else m for m in stacked.modules]
    program = rules("rule r { match moe.block => cpu_moe() => lora_experts(rank = 3) }", tmp_path)
    with pytest.raises(InputRefused, match=r"M076.*PEFT names every expert's linear layers"):
        planned(replace(stacked, modules=tuple(listed)), program)


def test_memory_counts_what_backward_reads_for_the_factors() -> None:
    spec = FusedMoeSpec("fused_moe", 64, 96, 8, 2, "bf16", "bf16", "bf16", "scalar")
    bare, both = slots_of(spec, keep=True), slots_of(spec, keep=True, ranks=(8, 4))
    assert both.saved - bare.saved == 64 * 2 + 2 * (8 + 8) * 4  # the input, and fp32 rows of 8 for either product
    assert both.forward(10) > bare.forward(10)
    assert both.backward(10) > bare.backward(10)
    recompute = slots_of(spec, keep=False, ranks=(8, 4))
    assert recompute.saved == slots_of(spec, keep=False).saved
