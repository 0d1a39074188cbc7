"""Planning promises: one rule per slot, kernels that the host runs, devices by inheritance, true byte counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import CPU, captured, planned, rules

import ktc
from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation.host import Gpu
from ktc.language import dsl
from ktc.model.hf import latent_cache
from ktc.stages.plan.report import plan_json
from ktc.stages.rewrite import recipe, rewrite

EXPERTS = "rule experts { match moe.block => cpu_moe() }\n"


def refused(text: str, folder: Path, family: str = "deepseek_v2") -> tuple[str, ...]:
    with pytest.raises(InputRefused) as error:
        planned(captured(family), rules(text, folder))
    return tuple(d.code for d in error.value.diagnostics)


def test_two_rules_on_one_slot_are_refused(tmp_path: Path) -> None:
    assert refused(EXPERTS + "rule other { match moe.opaque as m => cpu_moe() on m.experts }", tmp_path) == ("M061",)


def test_an_overridden_rule_loses_its_claim_and_keeps_its_others(tmp_path: Path) -> None:
    text = """
    rule all_linears { match linear at "**.self_attn.*" => lora_linear(rank = 4) }
    rule last overrides all_linears { match linear at "model.layers.2.self_attn.*" => lora_linear(rank = 16) }
    """
    _, plan = planned(captured("qwen3_moe"), rules(text, tmp_path))
    assert plan.lora is not None
    assert len(plan.lora.targets) == 12
    assert plan.lora.r == 4
    assert set(plan.lora.rank_pattern.values()) == {16}
    assert all(".2." in path for path in plan.lora.rank_pattern)
    assert [len(r.sites) for r in plan.rewrites] == [2, 1]


def test_an_adapter_on_something_that_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    assert refused("rule a { match moe.block as m => lora_linear(rank = 4) on m.router.gate }", tmp_path) == ("M065",)


@pytest.fixture
def keys_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of the model cache keys and values, as in older releases of transformers."""
    monkeypatch.setattr(latent_cache, "caches_latents", lambda stock: False)


@pytest.mark.usefixtures("keys_in_the_cache")
def test_attention_without_latents_is_left_alone_by_a_rule_that_may_match_nothing() -> None:
    _, plan = planned(captured("deepseek_v2"), dsl.load("moe-inference", {}))
    assert [each.code for each in plan.warnings] == ["M081"]
    assert "`model.layers.0.self_attn`, `model.layers.1.self_attn`" in plan.warnings[0].message
    targets = {action.target.name for each in plan.rewrites for action in each.actions}
    assert targets == {"cpu_moe", "kt_linear"}


@pytest.mark.usefixtures("keys_in_the_cache")
@pytest.mark.parametrize("expect", ["", "expect >= 1", "expect 3"])
def test_attention_without_latents_is_refused_where_the_rule_expects_it(expect: str, tmp_path: Path) -> None:
    assert refused(f"rule a {{ match attn.mla {expect} => mla_absorbed() }}", tmp_path) == ("M081",)


def test_a_program_that_rewrites_nothing_is_refused(tmp_path: Path) -> None:
    assert refused('rule a { match module at "model" => place(cpu) }', tmp_path) == ("M071",)


def test_the_kernel_has_the_models_shape_and_the_best_isa(tmp_path: Path) -> None:
    _, plan = planned(captured("deepseek_v2"), rules(EXPERTS, tmp_path))
    (spec,) = plan.kernels
    assert (spec.hidden, spec.intermediate, spec.num_experts, spec.top_k) == (64, 48, 16, 4)
    assert (spec.isa, spec.format_down, str(spec.activation)) == ("avx512_bf16", "bf16", "silu")


def test_an_isa_that_the_host_lacks_is_refused(tmp_path: Path) -> None:
    program = rules("rule experts { match moe.block => cpu_moe(isa = avx512_bf16) }", tmp_path)
    with pytest.raises(HostLacks) as error:
        planned(captured("deepseek_v2"), program, replace(CPU, isas=("avx2", "scalar")))
    assert error.value.diagnostics[0].code == "M064"
    assert error.value.diagnostics[0].span is not None


def test_a_stored_format_without_a_kernel_is_told_not_converted(tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refusal:
        planned(captured("deepseek_v2", torch.float32), rules(EXPERTS, tmp_path))
    (missing,) = refusal.value.diagnostics
    assert missing.code == "M068"
    assert "`fp32` weights (the checkpoint's own)" in missing.message
    assert "format = bf16" in missing.hint
    program = rules("rule e { match moe.block => cpu_moe(format = bf16) }", tmp_path)
    _, plan = planned(captured("deepseek_v2", torch.float32), program)
    assert plan.kernels[0].format_down == "bf16"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (EXPERTS + 'rule r { match module at "model" => place(cpu, prefill = cpu) }', ("M078",)),
        ("rule r { match attn.mla as a => fake_quant(int4, group = 16) on a.o }", ("M085",)),
    ],
)
def test_what_is_not_built_is_refused(text: str, codes: tuple[str, ...], tmp_path: Path) -> None:
    assert refused(text, tmp_path) == codes


def test_placement_is_inherited_and_experts_stay_on_the_cpu(tmp_path: Path) -> None:
    text = """
    param device : device = auto
    rule all   { match module at "model", "lm_head" => place($device) }
    rule table { match embedding => place(cpu) }
    """
    gpu = replace(CPU, gpus=(Gpu("test", 24 << 30),))
    _, plan = planned(captured("deepseek_v2"), rules(EXPERTS + text, tmp_path), gpu)
    placed = {"": "cpu", "model": "cuda:0", "lm_head": "cuda:0", "model.embed_tokens": "cpu"}
    assert {p.fqn: p.device for p in plan.placements} == placed
    loads = {load.device: load.weights for load in plan.devices}
    stored, packed = (2 * 16 * 3 * 64 * inter * 2 for inter in (48, 64))  # kernels pad to whole panels
    table = 128 * 64 * 2
    model = captured("deepseek_v2").model
    total = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    assert loads["cpu"] == packed + table
    assert loads["cuda:0"] == total - stored - table
    (rewrite,) = plan.rewrites
    assert rewrite.device == "cuda:0"
    assert set(rewrite.node_devices.values()) == {"cpu"}


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    text = EXPERTS + 'rule all { match module at "model", "lm_head" => place(cuda:1) }'
    with pytest.raises(HostLacks) as error:
        planned(captured("deepseek_v2"), rules(text, tmp_path))
    assert [diagnostic.code for diagnostic in error.value.diagnostics] == ["M069"]  # once for both places


def test_a_budget_of_a_gpu_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    _, plan = planned(captured("deepseek_v2"), rules(EXPERTS + "plan { cpu = 8GB  cuda:3 = 8GB }", tmp_path))
    (warning,) = [diagnostic for diagnostic in plan.warnings if diagnostic.code == "M069"]
    assert (warning.severity, "`cuda:3`" in warning.message) == ("warning", True)
    assert warning.span is not None


def test_a_device_that_cannot_hold_its_weights_is_told(tmp_path: Path) -> None:
    _, plan = planned(captured("deepseek_v2"), rules(EXPERTS, tmp_path), replace(CPU, memory=100_000))
    assert [d.code for d in plan.over_budget] == ["M070"]


def test_shipped_programs_plan_both_embedded_families() -> None:
    programs = [("deepseek_v2", "moe-lora"), ("qwen3_moe", "moe-lora")]
    for family, name in programs:
        _, plan = planned(captured(family), dsl.load(name, {}))
        assert plan.mode == "train"
        assert plan.lora is not None
        assert (plan.lora.r, plan.lora.lora_alpha, plan.lora.lora_dropout) == (8, 32.0, 0.1)
        assert len(plan.lora.targets) == 12
        refused = [found.code for found in plan.warnings if found.code == "A613"]
        assert refused == ["A613"] * (family == "deepseek_v2")  # adapters of latent keys have no GGUF form


def test_trainable_parameters_are_counted_as_peft_will_have_them() -> None:
    _, plan = planned(captured("qwen3_moe"), dsl.load("moe-lora", {}))
    assert plan.lora is not None
    per_layer = 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
    assert plan.lora.trainable == 3 * per_layer


def test_two_equal_compilations_have_equal_plans() -> None:
    plans = [planned(captured("deepseek_v2"), dsl.load("moe-lora", {}))[1] for _ in range(2)]
    assert plan_json(plans[0]) == plan_json(plans[1])


def test_every_layer_has_the_threads_of_its_own_rule(tmp_path: Path) -> None:
    text = """
    rule one { match moe.block as m where m.layer == 1 => cpu_moe(threads = 1) }
    rule two { match moe.block as m where m.layer == 2 => cpu_moe(threads = 2) }
    """
    model = captured("deepseek_v2")
    _, plan = planned(model, rules(text, tmp_path))
    rows = recipe(rewrite(model, plan), plan.host)
    assert [row.args["threads"] for row in rows] == [1, 2]


def test_experts_and_blocks_that_stay_as_they_are_are_told(tmp_path: Path) -> None:
    text = 'rule a { match linear at "**.self_attn.*" => lora_linear(rank = 4) }'
    _, plan = planned(captured("qwen3_moe"), rules(text, tmp_path))
    (warning,) = [d for d in plan.warnings if d.code == "M073"]
    assert "model.layers.[0..2].mlp stays as it is: no rule rewrites the routed experts" in warning.message
    _, plan = planned(captured("qwen3_moe", hidden_act="mish"), rules(text, tmp_path))
    (warning,) = [d for d in plan.warnings if d.code == "M073"]
    assert "could not be captured" in warning.message


def test_a_node_that_is_used_outside_the_match_is_not_absorbed(tmp_path: Path) -> None:
    # The keys are a wildcard here, so the match does not hold the other half of what `kv_b` unfolds.
    text = """
    pattern values_only(x) -> o is mla {
      q         = linear(x)
      kv_a      = linear(x)
      latent, _ = split(kv_a)
      kv_b      = linear(rms_norm(latent))
      _, v      = split(kv_b)
      core      = sdpa(rope(q), _, v)
      o         = linear(core)
    }
    rule a { match values_only => mla_absorbed() }
    """
    with pytest.raises(InputRefused) as refusal:
        planned(captured("deepseek_v2"), rules(text, tmp_path))
    (problem,) = refusal.value.diagnostics
    assert problem.code == "M062"
    assert "would absorb `kv_b` at model.layers.0.self_attn" in problem.message


def test_a_rule_whose_matches_share_a_node_rewrites_it_once(tmp_path: Path) -> None:
    text = """
    pattern any_linear(x) -> y { y = linear(x) }
    rule a { match any_linear as m at "**.self_attn.q_proj" => lora_linear(rank = 4) on m.y }
    """
    _, plan = planned(captured("qwen3_moe"), rules(text, tmp_path))
    assert [len(r.actions) for r in plan.rewrites] == [1]


def test_compile_and_check_refuse_experts_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    out, program = tmp_path / "compiled_here", tmp_path / "later.ktr"
    program.write_text("rule on_gpu { match experts => gpu_moe() }\n")
    with pytest.raises(HostLacks) as refusal:
        ktc.compile("tiny:qwen3_moe", program, out, host=CPU)
    assert {d.code for d in refusal.value.diagnostics} == {"M069"}
    assert {d.severity for d in refusal.value.diagnostics} == {"error"}
    assert not out.exists()
    assert {d.code for d in ktc.check(program, "tiny:qwen3_moe", host=CPU)} == {"M069"}


@pytest.mark.parametrize(
    ("more", "gpus", "obstacle"),
    [
        ("", 1, None),
        ("", 0, "the model is on the CPU"),
        ("rule last { match module at 'model.layers.2' => place(cuda:1) }", 2, "the model is on 2 GPUs"),
        ("rule table { match embedding => place(cpu) }", 1, "`model.embed_tokens.weight` is on the CPU"),
        (
            "rule sent { match module at 'model.layers.1.self_attn' => place(stream = cuda:0) }",
            1,
            "are sent to the GPU",
        ),
    ],
)
def test_decoding_is_captured_where_all_but_experts_is_on_one_gpu(
    more: str, gpus: int, obstacle: str | None, tmp_path: Path
) -> None:
    text = """
    param device : device = auto
    rule all { match module at "model", "lm_head" => place($device) }
    plan { cuda_graph = decode }
    """
    host = replace(CPU, gpus=(Gpu("test", 24 << 30),) * gpus)
    _, plan = planned(captured("deepseek_v2"), rules(EXPERTS + text + more.replace("'", '"'), tmp_path), host)
    told = [d.message for d in plan.warnings if d.code == "M082"]
    assert plan.cuda_graph == (obstacle is None)
    assert told == [] if obstacle is None else obstacle in told[0]
    assert any("CUDA graphs" in reason.text for reason in plan.reasons) == plan.cuda_graph


@pytest.mark.parametrize(
    ("more", "gpus", "obstacle"),
    [
        ("plan { native_step = decode }", 0, None),
        ("plan { native_step = decode  mode = train }", 0, "the program trains"),
        ("rule head { match module at 'lm_head' => place(cuda:0) } plan { native_step = decode }", 1, "is on cuda:0"),
    ],
)
def test_decoding_steps_are_native_where_the_model_is_on_the_cpu(
    more: str, gpus: int, obstacle: str | None, tmp_path: Path
) -> None:
    host = replace(CPU, gpus=(Gpu("test", 24 << 30),) * gpus)
    _, plan = planned(captured("deepseek_v2"), rules(EXPERTS + more.replace("'", '"'), tmp_path), host)
    told = [d.message for d in plan.warnings if d.code == "M084"]
    assert plan.native_step == (obstacle is None)
    assert told == [] if obstacle is None else obstacle in told[0]
    assert any("native programs" in reason.text for reason in plan.reasons) == plan.native_step


@pytest.mark.parametrize(("gpus", "native"), [(0, True), (1, False)])
def test_a_program_may_name_both_kinds_of_steps(gpus: int, native: bool, tmp_path: Path) -> None:
    text = """
    param device : device = auto
    rule all { match module at "model", "lm_head" => place($device) }
    plan { cuda_graph = decode  native_step = decode }
    """
    host = replace(CPU, gpus=(Gpu("test", 24 << 30),) * gpus)
    _, plan = planned(captured("deepseek_v2"), rules(EXPERTS + text, tmp_path), host)
    assert (plan.native_step, plan.cuda_graph) == (native, not native)
    assert not [d for d in plan.warnings if d.code in ("M082", "M084")]
