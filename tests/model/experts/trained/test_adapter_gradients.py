"""Gradients of adapters on experts against float64, expert by expert, where some have no token and one nearly all.

Experts in INT4 have as their reference the values that their codes stand for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import ISAS, Layer, Load, error, random_layer, spec_of
from lora_layers import Adapted, adapt, trained, with_gradients
from stored_experts import stored_experts
from torch import Tensor

from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.layouts.stock_layout import canonical_parts, parts_of
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.lora import ExpertsLora

DEVICES = [
    "cpu",
    pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
EMPTY = 3  # the last experts, without a token


def crowded(layer: Layer) -> Layer:
    """Three tokens of four have expert 0 first; the other choices are spread over all but the last experts."""
    generator = torch.Generator().manual_seed(7)
    tokens, used = layer.index.shape[0], layer.num_experts - EMPTY
    others = torch.randint(1, used, (tokens,), generator=generator)
    first = torch.where(torch.rand(tokens, generator=generator) < 0.75, 0, others)
    second = (first + 1 + torch.randint(used - 1, (tokens,), generator=generator)) % used
    return replace(layer, index=torch.stack((first, second), -1).to(layer.index.dtype))


def stored_values(module: FusedMoe, layer: Layer) -> Layer:
    """The layer with the values that its experts have as codes."""
    stock = {name: tensor.clone() for name, tensor in layer.stock.items()}
    for expert in range(layer.num_experts):
        for name in stock:
            for part, values in canonical_parts(layer.form, name, stock[name][expert]):
                values.copy_(module.expert(expert, part).double())  # a view of the stock tensor
    assert {part for part in parts_of(layer.form) if "bias" not in part} == {"gate", "up", "down"}
    return replace(layer, stock=stock)


@pytest.mark.parametrize("resident", [False, True], ids=["sent", "resident"])
@pytest.mark.parametrize("stored", ["bf16", "int4"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_expert_has_its_gradient(load: Load, device: str, stored: str, resident: bool) -> None:
    if stored == "int4":
        module, layer = stored_experts(spec_of(ISAS[0], codes=("int4", 32)), 12, tokens=600)
        layer = crowded(stored_values(module, layer))
    else:
        layer = crowded(random_layer(256, 96, 12, 2, 600))
        module = load(layer, spec_of(ISAS[0]))
    module.offload = Offload((torch.device(device),), min_tokens=1, resident=resident)
    adapted = adapt(layer, (4, 8))
    found = [tensor.cpu() for tensor in gradients(module, adapted, torch.device(device))]
    expected = adapted.reference()
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert error(ours, theirs) <= 1.2e-2
    for ours, theirs in zip(found[3:], expected[3:], strict=True):
        assert not ours[-EMPTY:].any(), "no token went there"
        errors = [error(ours[expert], theirs[expert]) for expert in range(layer.num_experts - EMPTY)]
        assert max(errors) <= 2e-2, errors


def gradients(module: FusedMoe, adapted: Adapted, device: torch.device) -> tuple[Tensor, ...]:
    """Output, then the gradients of hidden states, routing weights and factors, with all of them on a device."""
    moved = replace(
        adapted.layer,
        x=adapted.layer.x.to(device),
        weights=adapted.layer.weights.to(device),
        index=adapted.layer.index.to(device),
    )
    products = (product for product in adapted.lora.products if product is not None)
    lora = ExpertsLora(*(replace(product, a=product.a.to(device), b=product.b.to(device)) for product in products))
    x, weights, factors = trained(Adapted(moved, lora), torch.bfloat16, torch.float32)
    out = module(x, moved.index, weights, factors)
    return with_gradients(out, moved.grad.to(device), (x, weights, *factors.factors))
