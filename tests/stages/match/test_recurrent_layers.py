"""Recurrent layers: their projections are found by structure, and adapters cover what PEFT's `all-linear` does.

`FAMILIES` are the families with such layers, with the class of a layer and the names that stock PEFT and ktc do not
share. PEFT itself is asked for its names, on the same small model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from families import CPU
from peft import LoraConfig, get_peft_model
from torch import nn

from ktc.language import dsl
from ktc.model import twin
from ktc.model.graph import ops
from ktc.model.graph.typed import named_modules, nodes_by_name
from ktc.model.linears.lora_linear import FusedLinear
from ktc.stages.capture import CapturedModel, ModelSource, capture
from ktc.stages.capture.model import build_on_meta
from ktc.stages.link.adapter import adapter_json
from ktc.stages.match import NodeRef, NodeSet, match
from ktc.stages.plan import LoraPlan, make_plan
from ktc.stages.proof import as_twin, carried_over, realised
from ktc.stages.rewrite import rewrite


@dataclass(frozen=True, slots=True)
class Layer:
    """The linear layers of a recurrent layer, before the core and behind it, and whether it has a convolution."""

    inputs: str
    out: str
    convolution: bool = True


FAMILIES: dict[str, Layer | None] = {
    "bailing_hybrid": Layer("q_proj k_proj v_proj forget_gate.f_proj b_proj g_proj", "o_proj"),
    "granitemoehybrid": Layer("in_proj", "out_proj"),
    "inkling2": None,  # its convolutions are within softmax attention, or without linear layers
    "jamba": Layer("in_proj x_proj", "out_proj"),
    "kimi_linear": Layer(
        "q_proj k_proj v_proj forget_gate.f_a_proj forget_gate.f_b_proj b_proj g_a_proj g_b_proj", "o_proj"
    ),
    "lfm2_moe": Layer("in_proj", "out_proj"),
    "minimax": Layer("qkv_proj output_gate", "out_proj", convolution=False),
    "nemotron_h": Layer("in_proj", "out_proj"),
    "qwen3_5_moe": Layer("in_proj_qkv in_proj_z in_proj_b in_proj_a", "out_proj"),
    "qwen3_next": Layer("in_proj_qkvz in_proj_ba", "out_proj"),
    "qwen4_exp": Layer("in_proj_qkv in_proj_z in_proj_b in_proj_a", "out_proj"),
}
QUICK = ("lfm2_moe", "qwen3_next")
EXPERTS = re.compile(r"\.experts(\.base_layer)?$|\.mlp\.gate$|\.gate\.")  # routed experts, and routers
SAMPLES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in FAMILIES]


@cache
def _captured(family: str) -> CapturedModel:
    config = twin.shrink(twin.default_config(family))
    config.dtype = torch.float32
    return capture(ModelSource(family, None, config, None))


def _adapter(family: str) -> LoraPlan:
    program = dsl.load("moe-lora", {"format": "bf16"})
    captured = _captured(family)
    lora = make_plan(captured, (), match(captured, program, CPU), program, CPU).lora
    assert lora is not None
    return lora


@pytest.mark.parametrize("family", SAMPLES)
def test_the_parts_of_a_recurrent_layer_are_found_by_structure(family: str) -> None:
    captured, layer = _captured(family), FAMILIES[family]
    places = match(captured, dsl.load("moe-lora", {"format": "bf16"}), CPU).of("recurrence")
    assert bool(places) == (layer is not None)
    for place in places:
        graph = captured.block(place.block).graph
        assert graph is not None and layer is not None
        nodes = nodes_by_name(graph)
        inputs, out, core = place.bindings["inputs"], place.bindings["o"], place.bindings["core"]
        assert isinstance(inputs, NodeSet) and isinstance(out, NodeRef) and isinstance(core, NodeRef)
        assert sorted(nodes[name].meta["fqn"] for name in inputs.nodes) == sorted(layer.inputs.split())
        assert nodes[out.node].meta["fqn"] == layer.out
        assert ops.operator(nodes[core.node]) == "recurrence"
        assert ("conv" in place.bindings) == layer.convolution


@pytest.mark.parametrize("family", SAMPLES)
def test_moe_lora_adapts_what_all_linear_of_stock_peft_does(family: str) -> None:
    """Without routed experts and routers; PEFT refuses `out_proj` in Nemotron-H, and so all of `all-linear`."""
    ours, model = set(_adapter(family).targets), build_on_meta(_captured(family).source.config)
    if family == "nemotron_h":
        linears = {name for name, module in named_modules(model) if isinstance(module, nn.Linear)}
        assert ours == {name for name in linears if name != "lm_head" and not name.endswith("out_proj")}
        return
    tuned = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    adapted = (name for name, module in named_modules(tuned) if hasattr(module, "lora_A"))
    theirs = {name.removeprefix("base_model.model.") for name in adapted}
    assert ours == {name for name in theirs if not EXPERTS.search(name)}


INT4 = """
import "std/attention.ktr" as attn
rule projections {
  match attn.recurrent as a
  expect >= 0
  => kt_linear(auto) on a.inputs, a.o
  => quantize(int4, group = -1) on a.inputs, a.o
}
"""
PROGRAMS = {"moe-inference": {"format": "bf16"}, "moe-qat": {"group": "-1"}, "int4": dict[str, str]()}


@pytest.mark.parametrize(
    ("family", "program"),
    [
        pytest.param(name, program, marks=() if name in QUICK else pytest.mark.full)
        for name in FAMILIES
        for program in PROGRAMS
        if program != "int4" or FAMILIES[name] is not None  # no rule of INT4 matches another layer
    ],
)
def test_programs_take_the_projections(family: str, program: str, tmp_path: Path) -> None:
    """Their layers are ktc's, the core is the model's, and together they compute what stock does."""
    captured, layer = _captured(family), FAMILIES[family]
    (tmp_path / "int4.ktr").write_text(INT4)
    rules = dsl.load(tmp_path / "int4.ktr" if program == "int4" else program, PROGRAMS[program])
    plan, stock = make_plan(captured, (), match(captured, rules, CPU), rules, CPU), as_twin(captured)
    ours, refused = realised(stock, [carried_over(captured, block, stock) for block in rewrite(captured, plan)], CPU)
    assert not refused
    names = set() if layer is None else {*layer.inputs.split(), layer.out}
    if program == "moe-qat" and family == "nemotron_h":
        names.discard("out_proj")  # PEFT refuses it
    taken = {name for name, module in named_modules(ours) if isinstance(module, FusedLinear)}
    assert all(any(path.endswith(f".{name}") for path in taken) for name in names)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, expected = (each(input_ids=ids, use_cache=False).logits for each in (ours, stock.model))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "inkling2"])
def test_twenty_steps_of_training_have_the_losses_of_stock_peft(family: str) -> None:
    captured, program = _captured(family), dsl.load("moe-lora", {"format": "bf16"})
    plan = make_plan(captured, (), match(captured, program, CPU), program, CPU)
    stock = as_twin(captured)
    ours, refused = realised(stock, [carried_over(captured, block, stock) for block in rewrite(captured, plan)], CPU)
    assert not refused and plan.lora is not None
    config = adapter_json(plan.lora, ())
    assert _losses(ours, config) == pytest.approx(_losses(stock.model, config), rel=1e-4)


def _losses(model: nn.Module, config: dict[str, object]) -> list[float]:
    torch.manual_seed(1)
    tuned = get_peft_model(model, LoraConfig(**{**config, "lora_dropout": 0.0})).train()  # type: ignore[arg-type]
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimiser, losses = torch.optim.AdamW(trained, lr=1e-3), list[float]()
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        tokens = torch.randint(3, 100, (2, 16), generator=generator)
        loss = tuned(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss))
    return losses


def test_adapters_stay_in_the_language_model_of_a_model_with_towers() -> None:
    config = twin.shrink(twin.default_config("qwen3_5_moe", whole=True))
    config.get_text_config().dtype = config.dtype = torch.bfloat16
    model = capture(ModelSource("whole", None, config, None))
    rules = dsl.load("moe-lora", {})
    plan = make_plan(model, (), match(model, rules, CPU), rules, CPU)
    assert isinstance(plan.lora, LoraPlan)
    targets = adapter_json(plan.lora, ())["target_modules"]
    assert [name for name in targets if "in_proj_qkv" in name]
    assert not [name for name in targets if "visual" in name]


def test_a_recurrent_block_that_is_left_as_it_is_changes_no_other_adapter() -> None:
    model = capture(ModelSource("left", None, twin.shrink(twin.default_config("qwen3_next")), None))
    (block,) = (block for block in model.blocks if block.recurrent)
    left = model.leaving({block.key: ("P001", "its proof failed")})
    assert left.facts["recurrent"] == model.facts["recurrent"] > 0


@pytest.mark.parametrize(
    ("family", "layer", "told"),
    [
        ("jamba", "dt_proj", "does nothing"), ("granitemoehybrid", "out_proj", "a fused kernel of a GPU"),
        ("lfm2_moe", "", ""),
    ],
)  # fmt: skip
def test_an_adapter_that_the_code_reads_past_is_named_once(family: str, layer: str, told: str) -> None:
    captured, program = _captured(family), dsl.load("moe-lora", {"format": "bf16"})
    plan = make_plan(captured, (), match(captured, program, CPU), program, CPU)
    warnings = [warning for warning in plan.warnings if warning.code == "M097"]
    assert len(warnings) == bool(layer)
    assert all(f".{layer}`" in warning.message and told in warning.message for warning in warnings)
