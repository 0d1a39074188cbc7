"""What the plan decides about weights that are rounded or train, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import captured, planned, rules

from ktc.diagnostics import InputRefused
from ktc.model.experts.layouts.packed import DTYPES, SlotRows
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.working_memory import slots_of
from ktc.stages.plan import Plan

EXPERTS = "match moe.block as m => cpu_moe()"
LORA = "lora { rank = 4 }\n"


def plan_of(text: str, folder: Path, family: str = "qwen3_moe") -> Plan:
    return planned(captured(family, moe_intermediate_size=64), rules(text, folder))[1]


def refused(text: str, folder: Path, code: str) -> str:
    with pytest.raises(InputRefused, match=code) as error:
        plan_of(text, folder)
    return str(error.value)


def reasons(plan: Plan) -> dict[str, str]:
    return {reason.path: reason.text.partition(":")[0] for reason in plan.reasons if "rounded" in reason.text}


def test_frozen_experts_and_projections_are_rounded_once(tmp_path: Path) -> None:
    text = f"""
    rule e {{ {EXPERTS} => fake_quant(int4, group = 64) on m.experts }}
    rule a {{ match attn.gqa as a => lora_linear on a.q, a.o => fake_quant(int4) on a.q, a.k }}
    """
    plan = plan_of(LORA + text, tmp_path)
    spec = plan.kernels[0]
    assert isinstance(spec, FusedMoeSpec)
    assert (spec.formats, spec.group_size) == (("int4",), 64)
    once = "the frozen weights are rounded to int4 with a scale per {} weights once, when they are loaded"
    assert reasons(plan)["model.layers.[0..2].mlp.experts"] == once.format(64)
    assert reasons(plan)["model.layers.[0..2].self_attn.{q_proj,k_proj}"] == once.format(32)
    assert plan.lora is not None
    assert plan.lora.modules == ()


def test_a_scale_per_row_and_scales_in_fp32_have_kernels_too(tmp_path: Path) -> None:
    for settings, formats in (("group = -1", ("int4",)), ("scale_mode = slime", ("bf16",))):
        plan = plan_of(f"rule e {{ {EXPERTS} => fake_quant(int4, {settings}) on m.experts }}", tmp_path)
        assert isinstance(spec := plan.kernels[0], FusedMoeSpec)
        assert spec.formats == formats


def test_trained_modules_are_counted_with_masters_gradients_and_moments(tmp_path: Path) -> None:
    text = f"""
    rule e {{ {EXPERTS} => train on m.experts => fake_quant(int4) on m.experts }}
    rule a {{ match attn.gqa as a => train on a.q }}
    rule n {{ match module at "model.norm", "model.layers.*.mlp.gate" => train }}
    """
    plan, plain = plan_of(text, tmp_path), plan_of(f"rule e {{ {EXPERTS} }}", tmp_path)
    assert plan.mode == "train"
    assert plan.lora is not None
    assert (plan.lora.targets, len(plan.lora.modules)) == ((), 3 + 3 + 1 + 3)
    model = captured("qwen3_moe", moe_intermediate_size=64).model
    sizes = {fqn: sum(p.numel() for p in model.get_submodule(fqn).parameters()) for fqn in plan.lora.modules}
    assert plan.lora.trainable == sum(sizes.values())
    experts = sum(size for fqn, size in sizes.items() if fqn.endswith("experts"))
    linear = sum(size for fqn, size in sizes.items() if fqn.endswith("q_proj"))
    (load,), (bare,) = plan.devices, plain.devices
    assert load.adapter >= 16 * (experts + linear)  # copy, gradient and two moments in fp32
    assert load.weights > bare.weights + 4 * experts - bare.kinds["experts"]


def test_the_rows_that_gradients_of_weights_are_made_of_are_counted(tmp_path: Path) -> None:
    plan = plan_of(f"rule e {{ {EXPERTS} => train on m.experts }}", tmp_path)
    spec = plan.kernels[0]
    assert isinstance(spec, FusedMoeSpec)
    assert spec.intermediate is not None and spec.top_k is not None
    training = plan.memory.workloads[0]
    tokens = training.batch * training.length
    rows = SlotRows.empty(tokens * spec.top_k, 2, spec.intermediate, DTYPES[spec.dtype])
    trains, frozen = (slots_of(spec, keep=True, weights_train=each) for each in (True, False))
    assert trains.backward(tokens) - frozen.backward(tokens) == rows.d_first.nbytes + rows.activated.nbytes
    assert training.needs["cpu"]["workspace"] >= rows.d_first.nbytes + rows.activated.nbytes


def test_a_capture_without_parameters_of_its_own_trains_what_has_them(tmp_path: Path) -> None:
    plan = plan_of(f"rule e {{ {EXPERTS} => train on m.router }}", tmp_path)
    assert plan.lora is not None
    assert plan.lora.modules == tuple(f"model.layers.{layer}.mlp.gate" for layer in range(3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rule e { match moe.block as m => fake_quant(int4) on m.experts }",
            "no rule with `cpu_moe` runs these experts",
        ),
        (f"rule e {{ {EXPERTS} => fake_quant(int4, group = 128) on m.experts }}", "groups of 128 do not divide hidden"),
        ("rule n { match moe.block as m => fake_quant(int4) on m.router.gate }", "neither a linear layer nor experts"),
        ('rule q { match linear at "**.q_proj" => fake_quant(int4, weights = merged) }', "it has none"),
        (
            (
                'lora { rank = 4  dropout = 0.1 }\nrule q { match linear at "**.q_proj" => lora_linear '
                "=> fake_quant(int4, weights = merged) }"
            ),
            "an adapter with dropout cannot be merged",
        ),
        (
            (
                f"lora {{ rank = 4  dropout = 0.1 }}\nrule e {{ {EXPERTS} => lora_experts on m.experts "
                "=> fake_quant(int4, group = 32, weights = merged) on m.experts }"
            ),
            "an adapter with dropout cannot be merged",
        ),
        (
            LORA + 'rule q { match linear at "**.q_proj" => lora_linear => fake_quant(int4, weights = merged) }\n'
            'rule k { match linear at "**.k_proj" => lora_linear => fake_quant(int4) }',
            "rounds the base of `model.layers.0.self_attn.k_proj` and the merged weights of",
        ),
        (
            LORA + "rule q { match attn.gqa as a => quantize(int4) on a.q }\n"
            'rule a { match linear at "**.q_proj" => lora_linear }',
            "`lora_linear` trains on it",
        ),
    ],
)
def test_weights_that_cannot_be_rounded_are_refused_once(text: str, message: str, tmp_path: Path) -> None:
    told = refused(text, tmp_path, "M085")
    assert message in told
    assert told.count("M085") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('rule n { match module at "model.norm" => train(masters = fp32) }', "trains in its own dtype"),
        (
            (
                'rule q { match linear at "**.q_proj" => train }\n'
                'rule k { match linear at "**.q_proj" => kt_linear(gemv) }'
            ),
            "multiplies a weight that does not change",
        ),
        (
            (
                'rule a { match module at "model.layers.1.self_attn" => train }\n'
                'rule k { match linear at "**.q_proj" => kt_linear(torch) }'
            ),
            "rewrites `model.layers.1.self_attn.q_proj` inside of it",
        ),
        ("rule e { match moe.block as m => cpu_moe(format = int8) => train on m.experts }", "would round its masters"),
    ],
)
def test_modules_that_cannot_train_are_refused(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused(text, tmp_path, "M086")


def test_tied_embeddings_do_not_train(tmp_path: Path) -> None:
    model = captured("qwen3_moe", tie_word_embeddings=True)
    with pytest.raises(InputRefused, match="tied to another one"):
        planned(model, rules(f'{LORA}rule t {{ match module at "model.embed_tokens" => train }}', tmp_path))
