"""Resident experts of few tokens, multiplied where they are: beside the kernel of the CPU, and beside PyTorch.

Without a GPU, Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import ISAS, Load, error, quick_or_slow, random_layer, spec_of
from stored_experts import in_blocks, stored_experts
from torch import Tensor

from ktc.diagnostics import HostLacks
from ktc.model.experts.backends import resident_backend
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.gpu import chosen_kernels
from ktc.model.experts.gpu.chosen_kernels import Tile
from ktc.model.experts.kept import chosen_experts
from ktc.model.experts.kept.chosen_experts import are_few
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.kernels.form import parse_form
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
LIMITED = "silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved"
FORMS = ["silu", LIMITED, "silu(gate_cap=2.0, up_cap=1.5)", "gelu", "gelu_tanh", "relu ungated", "relu2 ungated biased"]
CODED = [spec_of(ISAS[0], codes=("int4", 32)), in_blocks("q4_0", "q8_0")]


@pytest.fixture(autouse=True)
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU have the kernels, for a layer of small sizes, and no other way to multiply."""
    monkeypatch.setattr(chosen_experts, "multiplies_codes", lambda _: True)
    monkeypatch.setattr(chosen_experts, "_HIDDEN", 40)
    monkeypatch.setattr(resident_backend, "ChunkProducts", None)
    chosen_experts._check_plain.cache_clear()


def resident_call(module: FusedMoe, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a layer whose experts are resident, and that of the kernel."""
    with torch.no_grad():
        wanted = module(x, index, weights)
        module.offload = Offload((DEVICE,), min_tokens=1000, resident=True)
        computed = module(x.to(DEVICE), index.to(DEVICE), weights.to(DEVICE))
        assert torch.equal(computed, module(x.to(DEVICE), index.to(DEVICE), weights.to(DEVICE)))
    return computed.cpu().float(), wanted.float()


@pytest.mark.parametrize("form", [quick_or_slow(form, form in FORMS[:2]) for form in FORMS])
def test_few_tokens_read_the_chosen_experts_of_every_form(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 8, 2, 3, form=form)
    module = load(layer, spec_of(ISAS[0], form=form))
    assert error(*resident_call(module, layer.x.bfloat16(), layer.index, layer.weights.float())) <= 0.01


@pytest.mark.parametrize("spec", [quick_or_slow(spec, spec is CODED[0]) for spec in CODED], ids=["int4", "blocks"])
def test_few_tokens_multiply_codes_where_they_are(spec: FusedMoeSpec) -> None:
    module, layer = stored_experts(spec, 8, tokens=2)
    assert error(*resident_call(module, layer.x.bfloat16(), layer.index, layer.weights.float())) <= 0.01


@pytest.mark.parametrize("form", ["silu", "silu(limit=0.5) biased interleaved"])
def test_matrices_of_several_tiles_and_all_tokens_have_the_sums_of_pytorch(form: str) -> None:
    read = parse_form(form)
    layer = random_layer(70, 37, 5, 2, 2, form=form)
    x, weights, stock = layer.x.float(), layer.weights.float(), [weight.float() for weight in layer.stock.values()]
    wanted = fused_moe_reference(x, layer.index, weights, stock, form)
    first, down, *biases = (weight.to(DEVICE) for weight in stock)
    (gate_up_bias, down_bias), experts, tile = biases or (None, None), layer.index.flatten().to(DEVICE), Tile(8, 32, 4)
    h = chosen_kernels.activations(x.to(DEVICE), experts, first, gate_up_bias, read, tile)
    out = chosen_kernels.outputs(h, experts, weights.to(DEVICE), down, down_bias, torch.float32, tile)
    assert error(out.cpu(), wanted) <= 1e-6


def test_calls_with_more_choices_than_experts_are_grouped() -> None:
    assert are_few(1, 6, 64) and are_few(10, 6, 64) and are_few(16, 4, 64)
    assert not are_few(11, 6, 64) and not are_few(17, 1, 64) and not are_few(0, 6, 64)


def test_products_of_chosen_experts_are_checked_before_their_use(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(70, 37, 8, 2, 3)
    module = load(layer, spec_of(ISAS[0]))
    monkeypatch.setattr(chosen_experts, "by_number", lambda *_: torch.ones(2, 40))
    module.offload = replace(Offload((DEVICE,), min_tokens=1000, resident=True))
    with pytest.raises(HostLacks, match=r"H247.*chosen experts of the form `silu`"), torch.no_grad():
        module(layer.x.bfloat16(), layer.index, layer.weights.float())
