"""The form of experts: what the reference computes, and what a module of that form shows and refuses."""

from __future__ import annotations

import pytest
import torch
from kernel_layers import FORMS, ISAS, Load, experts_of, random_layer, run, spec_of
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.kernels.form import Activation, ExpertsForm, parse_form
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec

GPT_OSS = "silu(alpha=1.702, limit=7.0, up_offset=1.0) biased transposed interleaved"


def test_the_reference_computes_what_gpt_oss_does() -> None:
    config = GptOssConfig(hidden_size=16, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    stock = GptOssExperts(config).double()
    generator = torch.Generator().manual_seed(3)
    for weight in stock.parameters():
        torch.nn.init.normal_(weight, std=3.0, generator=generator)  # large, so that the limit is met
    x = torch.randn(9, 16, generator=generator, dtype=torch.float64)
    weights, index = torch.rand(9, 4, generator=generator, dtype=torch.float64).topk(2)
    tensors = (stock.gate_up_proj, stock.down_proj, stock.gate_up_proj_bias, stock.down_proj_bias)
    assert torch.allclose(fused_moe_reference(x, index, weights, tensors, GPT_OSS), stock(x, index, weights))


def test_an_expert_without_a_gate_applies_its_function_to_up_alone() -> None:
    layer = random_layer(16, 12, 2, 1, 5, form="relu2 ungated")
    up, down = layer.stock["up_proj"], layer.stock["down_proj"]
    out = fused_moe_reference(layer.x, layer.index, layer.weights, (up, down), layer.form)
    for token, (expert,) in enumerate(layer.index.tolist()):
        alone = F.relu(layer.x[token] @ up[expert].T).square() @ down[expert].T
        assert torch.allclose(out[token], alone * layer.weights[token])


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_differentiable_in_every_float_input(form: str) -> None:
    layer = random_layer(5, 4, 3, 2, 4, form=form)
    inputs = [tensor.clone().requires_grad_() for tensor in (layer.x, layer.weights, *layer.stock.values())]
    assert torch.autograd.gradcheck(lambda x, w, *stock: fused_moe_reference(x, layer.index, w, stock, form), inputs)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_back_as_it_is_spelled(form: str) -> None:
    assert str(parse_form(form)) == form


@pytest.mark.parametrize(
    "text",
    ["", "tanh", "silu(alpha=2)", "gelu(alpha=2.0)", "silu(limit=0.0)", "silu(limit=inf)", "silu(up_offset=nan)",
     "silu(limit=1.0) ungated", "relu ungated interleaved", "silu transposed biased", "silu(beta=1.0)"],
)  # fmt: skip
def test_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a form of experts"):
        parse_form(text)


def test_biases_and_form_must_agree() -> None:
    layer = random_layer(16, 12, 2, 1, 5)
    inputs, stock = (layer.x, layer.index, layer.weights), (*layer.stock.values(),)
    with pytest.raises(ValueError, match="need both biases"):
        fused_moe_reference(*inputs, stock, "silu biased")
    with pytest.raises(ValueError, match="take no bias"):
        fused_moe_reference(*inputs, (*stock, torch.zeros(2, 24), torch.zeros(2, 16)), "silu")


@pytest.mark.parametrize("with_kernel", [True, False])
def test_a_module_shows_the_tensors_of_its_stock_module(load: Load, with_kernel: bool) -> None:
    form = FORMS[1]
    module = load(random_layer(16, 12, 4, 2, 1, form=form), spec_of(ISAS[0], form=form) if with_kernel else None)
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    assert shapes == {
        "gate_up_proj": (4, 16, 24),
        "down_proj": (4, 12, 16),
        "gate_up_proj_bias": (4, 24),
        "down_proj_bias": (4, 16),
    }


def test_every_part_of_the_form_must_be_loaded() -> None:
    module = experts_of(1, 8, 4, 1, "silu ungated biased")
    assert module.missing() == ((0, "up"), (0, "down"), (0, "up_bias"), (0, "down_bias"))
    with pytest.raises(ValueError, match="have no `gate`, only up, down, up_bias, down_bias"):
        module.load_expert(0, "gate", torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"`up_bias`: expected shape \(4,\), found \(8,\)"):
        module.load_expert(0, "up_bias", torch.zeros(8))


@pytest.mark.parametrize(("part", "lacks"), [("gate", "without a gate"), ("up_bias", "without biases")])
def test_a_kernel_refuses_parts_it_was_not_built_for(load: Load, part: str, lacks: str) -> None:
    module = load(random_layer(16, 12, 2, 1, 1, form="relu2 ungated"), spec_of(ISAS[0], form="relu2 ungated"))
    module.weights.form = parse_form("silu biased")
    with pytest.raises(ValueError, match=f"this kernel is for experts {lacks}"):
        module.load_expert(0, part, torch.zeros(12, 16) if part == "gate" else torch.zeros(12))  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ISAS)
def test_a_limit_that_rounding_would_reach_gives_no_gradient(load: Load, isa: str) -> None:
    form = FORMS[1]  # its limit is exact in bf16, and what lies just above rounds onto it
    layer = random_layer(16, 12, 1, 1, 1, form=form)
    for tensor in layer.stock.values():
        tensor.zero_()
    layer.stock["gate_up_proj_bias"].fill_(1.2515)
    layer.stock["gate_up_proj"].fill_(0.5)
    layer.stock["down_proj"].fill_(1.0)
    layer.x.zero_()
    _, d_x, _ = run(load(layer, spec_of(isa, form=form)), layer)  # type: ignore[arg-type]
    assert not d_x.any()


def test_the_entry_of_a_spec_is_an_identifier_of_its_form() -> None:
    entries = {spec_of("scalar", form=form).entry for form in FORMS}
    assert len(entries) == len(FORMS)
    assert all(entry.isidentifier() for entry in entries)
    odd = ExpertsForm(Activation("silu", alpha=1e-05, limit=1e20, up_offset=-0.5))
    spec = FusedMoeSpec("fused_moe", 8, 8, 2, 1, "bf16", "bf16", "bf16", "scalar", odd.activation)
    assert spec.entry == "FusedMoe_H8_I8_E2_k1_bf16_bf16_scalar_silu_alpha1em05_limit1e20_upm0p5"
