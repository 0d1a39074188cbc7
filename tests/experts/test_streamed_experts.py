"""Experts computed elsewhere, from their packed bytes: what the kernel computes, with every gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_layers import EXACT_FORMS, FORMS, ISAS, Load, error, random_layer, run, spec_of
from lora_layers import adapt, run_adapted

from ktc.experts import expert_stream
from ktc.experts.backend import Offload
from ktc.experts.expert_stream import ExpertStream
from ktc.experts.form import parse_form
from ktc.experts.lora import ExpertsLora
from ktc.experts.streamed_backend import compute

CPU = Offload(torch.device("cpu"), min_tokens=1)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_those_that_the_kernel_unpacks(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 5, 2, 3, form=form)
    module = load(layer, spec_of(ISAS[0], form=form))
    assert module.weights.packed is not None
    stream = ExpertStream(module.weights.packed, module.form, torch.device("cpu"))
    for expert, (gate_up, down, gate_up_bias, down_bias) in stream.each(range(5)):
        assert torch.equal(down, module.expert(expert, "down"))
        alternating = module.form.interleaved
        rows = gate_up.unflatten(0, (-1, 2)).transpose(0, 1) if alternating else gate_up.unflatten(0, (-1, 37))
        parts = ("gate", "up") if module.form.gated else ("up",)
        for part, found in zip(parts, rows, strict=True):
            assert torch.equal(found, module.expert(expert, part))
        assert (gate_up_bias is None) == (down_bias is None) == (not module.form.biased)


@pytest.mark.parametrize("form", EXACT_FORMS)
def test_output_and_gradients_are_the_references(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 5, 2, 41, form=form)
    module = load(layer, spec_of("scalar", "fp64", form))
    module.offload = CPU
    for ours, theirs in zip(run(module, layer, torch.float64), layer.expected(), strict=True):
        assert error(ours, theirs) <= 1e-12


def test_factors_of_lora_have_their_gradients(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 41, experts_used=4), (3, 5))
    module = load(adapted.layer, spec_of("scalar", "fp64"))
    module.offload = CPU
    found, expected = run_adapted(module, adapted, torch.float64), adapted.reference()
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) <= 1e-12
    assert not found[3][4].any()  # no token went to expert 4


def test_bf16_rounds_as_the_kernel_does(load: Load) -> None:
    layer = random_layer(256, 96, 8, 2, 64)
    module = load(layer, spec_of(ISAS[0]))
    module.offload = CPU
    for ours, theirs, limit in zip(run(module, layer), layer.expected(), (5e-3, 6e-3, 6e-3), strict=True):
        assert error(ours, theirs) <= limit


def test_few_tokens_stay_with_the_kernel(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, spec_of(ISAS[0]), offload=Offload(torch.device("cpu"), min_tokens=10))
    monkeypatch.setattr("ktc.experts.streamed_backend.compute", None)
    module(layer.x.bfloat16(), layer.index, layer.weights)
    with pytest.raises(TypeError):
        module(layer.x.bfloat16().repeat(2, 1), layer.index.repeat(2, 1), layer.weights.repeat(2, 1))


def test_no_tokens_and_no_such_expert(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 3)
    module = load(layer, spec_of(ISAS[0]), offload=Offload(torch.device("cpu"), min_tokens=0))
    assert module(layer.x[:0].bfloat16(), layer.index[:0], layer.weights[:0]).shape == (0, 64)
    with pytest.raises(IndexError, match="names expert 4"):
        module(layer.x.bfloat16(), layer.index + 1, layer.weights)


def test_autocasting_does_not_change_the_dtype_of_the_experts() -> None:
    layer = random_layer(64, 32, 1, 1, 9)
    gate_up, down = torch.randn(64, 64), torch.randn(64, 32)
    matrices = gate_up, down, None, None
    stream: Any = SimpleNamespace(
        num_experts=1, form=parse_form("silu"), device=CPU.device, each=lambda wanted: [(0, matrices)]
    )
    arguments = stream, layer.x.float(), layer.index, layer.weights.float(), ExpertsLora()
    expected = compute(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compute(*arguments), expected)


def test_storage_is_locked_once_and_until_its_experts_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts:
        def __init__(self, packed: torch.Tensor) -> None:
            self.packed = packed

    told: list[tuple[str, int]] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: told.append(("lock", address)) or 0,
        cudaHostUnregister=lambda address: told.append(("unlock", address)),
    )
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    packed = torch.empty(64, dtype=torch.uint8)
    for _ in range(2):  # other experts come to lie at the same address
        experts: Any = Experts(packed)
        for _ in range(2):
            expert_stream._page_lock(experts, torch.device("cuda:0"))
        del experts
    assert told == [("lock", packed.data_ptr()), ("unlock", packed.data_ptr())] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("experts_used", [1, 5, 40])
def test_on_a_gpu_in_chunks(load: Load, experts_used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.experts.expert_stream._CHUNK_BYTES", 1 << 20)
    layer = random_layer(256, 320, 40, 1, 777, experts_used=experts_used)
    module = load(layer, spec_of(ISAS[0]), offload=Offload(torch.device("cuda:0"), min_tokens=1))
    x, weights = layer.x.bfloat16().cuda().requires_grad_(), layer.weights.float().cuda().requires_grad_()
    for _ in range(3):  # places are used again
        out = module(x, layer.index.cuda(), weights)
        found = (out.detach(), *torch.autograd.grad(out, (x, weights), layer.grad.bfloat16().cuda()))
        for ours, theirs, limit in zip(found, layer.expected(), (5e-3, 6e-3, 6e-3), strict=True):
            assert ours.device == x.device
            assert error(ours.cpu(), theirs) <= limit
