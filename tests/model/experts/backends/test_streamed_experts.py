"""Experts computed elsewhere, from their packed bytes: what the kernel computes, with every gradient."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_layers import (
    EXACT,
    EXACT_FORMS,
    FORMS,
    ISAS,
    Layer,
    Load,
    error,
    quick_or_slow,
    random_layer,
    run,
    spec_of,
)
from lora_layers import adapt, run_adapted
from refresh_cycle import assert_cycle
from stored_experts import in_blocks, stored_experts

from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.backends.cpu_backend import CpuKernel
from ktc.model.experts.backends.resident_backend import GpuResident
from ktc.model.experts.backends.streamed_backend import compute
from ktc.model.experts.host.page_lock import page_lock
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.products.packed_layout import Matrices, PackedLayout
from ktc.model.experts.streamed.expert_stream import expert_stream
from ktc.model.experts.streamed.stream_sizes import ChunkBytes
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.kernels.form import parse_form
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec

CPU = Offload((torch.device("cpu"),), min_tokens=1)


# Kernels that other quick tests build too: codes of 4 and 8 bits, blocks with nibbles and with upper bits.
QUICK = [spec_of(ISAS[0], codes=("int4", 32)), spec_of(ISAS[0], codes=("int8", 0)), in_blocks("q4_k", "q6_k")]
OTHERS = [spec_of(ISAS[0], codes=("int4", 128)), spec_of(ISAS[0], codes=("fp8", 128)), in_blocks("q8_0", "q4_0"),
          in_blocks("q4_1", "q5_k"), in_blocks("mxfp4", "fp16")]  # fmt: skip
STORED = [quick_or_slow(spec, spec in QUICK) for spec in (*QUICK, *OTHERS)]


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_those_that_the_kernel_unpacks(load: Load, form: str) -> None:
    module = load(random_layer(70, 37, 5, 2, 3, form=form), spec_of(ISAS[0], form=form))
    assert_matrices_are_the_kernels(module)


@pytest.mark.parametrize("spec", STORED, ids=lambda spec: f"{spec.format_gate_up} {spec.format_down} {spec.group_size}")
def test_every_format_is_decoded_to_the_kernels_bits(spec: FusedMoeSpec) -> None:
    assert_matrices_are_the_kernels(stored_experts(spec, 3)[0])


def assert_matrices_are_the_kernels(module: FusedMoe) -> None:
    assert module.weights.packed is not None
    stream = expert_stream(module.weights.packed, module.form, torch.device("cpu"))
    for chunk, matrices in stream.chunks(range(module.num_experts)):
        for place, expert in enumerate(chunk):
            assert torch.equal(matrices.down[place], module.expert(expert, "down"))
            gate_up = matrices.gate_up[place]
            alternating = module.form.interleaved
            shape = (-1, 2) if alternating else (-1, module.intermediate)
            rows = gate_up.unflatten(0, shape).transpose(0, 1) if alternating else gate_up.unflatten(0, shape)
            for part, found in zip(("gate", "up") if module.form.gated else ("up",), rows, strict=True):
                assert torch.equal(found, module.expert(expert, part))
            assert (matrices.gate_up_bias is None) == (matrices.down_bias is None) == (not module.form.biased)
            if matrices.down_bias is not None:
                assert torch.equal(matrices.down_bias[place], module.expert(expert, "down_bias"))


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


@pytest.mark.parametrize("form", [FORMS[1], FORMS[5]])
def test_factors_of_lora_on_every_form(load: Load, form: str) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 41, form=form), (3, 5))
    module = load(adapted.layer, spec_of("scalar", "fp64", form))
    module.offload = CPU
    for ours, theirs in zip(run_adapted(module, adapted, torch.float64), adapted.reference(), strict=True):
        assert error(ours, theirs) <= 1e-12


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped_mm", "a loop"])
def test_products_in_bf16_with_and_without_the_grouped_kernel(
    load: Load, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not grouped:
        monkeypatch.setattr("ktc.model.experts.products.grouped_products._has_kernel", lambda device, dtype: False)
    adapted = adapt(random_layer(256, 96, 8, 2, 64, experts_used=6), (3, 8))
    module = load(adapted.layer, spec_of(ISAS[0]))
    module.offload = CPU
    found = run_adapted(module, adapted)
    for ours, theirs in zip(found, adapted.reference(), strict=True):
        assert error(ours, theirs) <= 1.2e-2
    assert all(map(torch.equal, run_adapted(module, adapted), found))


def test_chunks_do_not_change_the_results(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(70, 37, 5, 2, 41)
    module = load(layer, spec_of("scalar", "fp64"), offload=CPU)
    whole = run(module, layer, torch.float64)
    monkeypatch.setattr("ktc.model.experts.streamed.expert_stream.chunk_bytes_on", lambda *_: ChunkBytes(1, 1))
    for ours, theirs in zip(run(module, layer, torch.float64), whole, strict=True):
        assert error(ours, theirs) <= 1e-14


def test_bf16_rounds_as_the_kernel_does(load: Load) -> None:
    layer = random_layer(256, 96, 8, 2, 64)
    module = load(layer, spec_of(ISAS[0]))
    module.offload = CPU
    for ours, theirs, limit in zip(run(module, layer), layer.expected(), (5e-3, 6e-3, 6e-3), strict=True):
        assert error(ours, theirs) <= limit


def test_few_tokens_stay_with_the_kernel(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, spec_of(ISAS[0]), offload=Offload((torch.device("cpu"),), min_tokens=10))
    monkeypatch.setattr("ktc.model.experts.backends.streamed_backend.compute", None)
    module(layer.x.bfloat16(), layer.index, layer.weights)
    with pytest.raises(TypeError):
        module(layer.x.bfloat16().repeat(2, 1), layer.index.repeat(2, 1), layer.weights.repeat(2, 1))


def test_no_tokens_and_no_such_expert(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 3)
    module = load(layer, spec_of(ISAS[0]), offload=Offload((torch.device("cpu"),), min_tokens=0))
    assert module(layer.x[:0].bfloat16(), layer.index[:0], layer.weights[:0]).shape == (0, 64)
    with pytest.raises(IndexError, match="names expert 4"):
        module(layer.x.bfloat16(), layer.index + 1, layer.weights)


def test_autocasting_does_not_change_the_dtype_of_the_experts() -> None:
    layer = random_layer(64, 32, 1, 1, 9)
    gate_up, down = torch.randn(64, 64), torch.randn(64, 32)
    matrices = Matrices(gate_up[None], down[None], None, None)
    stream: Any = SimpleNamespace(
        share=range(1),
        is_one_chunk=True,
        num_experts=1,
        device=torch.device("cpu"),
        form=parse_form("silu"),
        chunks=lambda wanted, reverse: [(range(1), matrices)],
        most_rows=1,
    )
    arguments = (stream,), layer.x.float(), layer.index, layer.weights.float(), ExpertsLora()
    expected = compute(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compute(*arguments), expected)


def test_devices_share_a_layers_experts(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 41), (3, 5))
    module = load(adapted.layer, spec_of("scalar", "fp64"))
    for count in (2, 3, 7):
        module.offload = Offload((torch.device("cpu"),) * count, min_tokens=1)
        for ours, theirs in zip(run_adapted(module, adapted, torch.float64), adapted.reference(), strict=True):
            assert error(ours, theirs) <= 1e-12


def test_a_device_without_any_slot_adds_nothing(load: Load) -> None:
    layer = random_layer(70, 37, 6, 2, 41, experts_used=2)
    module = load(layer, spec_of("scalar", "fp64"))
    module.offload = Offload((torch.device("cpu"),) * 2, min_tokens=1)
    for ours, theirs in zip(run(module, layer, torch.float64), layer.expected(), strict=True):
        assert error(ours, theirs) <= 1e-12


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
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    packed = torch.empty(64, dtype=torch.uint8)
    for _ in range(2):  # other experts come to lie at the same address
        experts: Any = Experts(packed)
        for _ in range(2):
            page_lock(packed, experts)
        del experts
    assert told == [("lock", packed.data_ptr()), ("unlock", packed.data_ptr())] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("experts_used", [1, 5, 40])
def test_on_a_gpu_in_chunks(load: Load, experts_used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ktc.model.experts.streamed.expert_stream.chunk_bytes_on", lambda *_: ChunkBytes(1 << 20, 1 << 20)
    )
    layer = random_layer(256, 320, 40, 1, 777, experts_used=experts_used)
    module = load(layer, spec_of(ISAS[0]), offload=Offload((torch.device("cuda:0"),), min_tokens=1))
    x, weights = layer.x.bfloat16().cuda().requires_grad_(), layer.weights.float().cuda().requires_grad_()
    for _ in range(3):  # places are used again
        out = module(x, layer.index.cuda(), weights)
        found = (out.detach(), *torch.autograd.grad(out, (x, weights), layer.grad.bfloat16().cuda()))
        for ours, theirs, limit in zip(found, layer.expected(), (5e-3, 6e-3, 6e-3), strict=True):
            assert ours.device == x.device
            assert error(ours.cpu(), theirs) <= limit


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_the_experts(load: Load) -> None:
    layer = random_layer(256, 320, 40, 2, 777)
    devices = torch.device("cuda:0"), torch.device("cuda:1")
    module = load(layer, spec_of(ISAS[0]), offload=Offload(devices, min_tokens=1))
    x, weights = layer.x.bfloat16().cuda().requires_grad_(), layer.weights.float().cuda().requires_grad_()
    results = []
    for _ in range(3):
        out = module(x, layer.index.cuda(), weights)
        found = (out.detach(), *torch.autograd.grad(out, (x, weights), layer.grad.bfloat16().cuda()))
        for ours, theirs, limit in zip(found, layer.expected(), (5e-3, 6e-3, 6e-3), strict=True):
            assert ours.device == x.device
            assert error(ours.cpu(), theirs) <= limit
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))


@pytest.mark.parametrize("resident", [True, False])
def test_replaced_weights_are_sent_again(load: Load, resident: bool) -> None:
    layer, other = (random_layer(70, 37, 8, 2, 3, seed=seed) for seed in (1, 2))
    module, wanted = load(layer, spec_of(ISAS[0])), load(other, spec_of(ISAS[0]))
    x, weights = layer.x.bfloat16(), layer.weights.float()
    for each in (module, wanted):
        each.offload = replace(CPU, min_tokens=1, resident=resident)
    with torch.no_grad():
        for _ in range(3):  # from the third time on, the next pass is foreseen and sent
            before = module(x, layer.index, weights)
        packed, experts = module.weights.packed, wanted.weights
        assert packed is not None

        def compute() -> torch.Tensor:
            return module(x, layer.index, weights)

        module.restore("other")
        module.weights.copy_from(experts)
        module.process()
        assert torch.equal(compute(), wanted(x, layer.index, weights))
        assert not torch.equal(compute(), before)
        assert_cycle(module, lambda: module.weights.copy_from(experts), compute, packed.packed.data_ptr)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[6]])
def test_plain_resident_experts_compute_what_the_kernel_does(
    load: Load, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer(70, 37, 8, 2, 9, form=form)
    module = load(layer, spec_of("scalar", "fp64", form) if form in EXACT else spec_of(ISAS[0], form=form))
    assert error(*resident_and_kernel(module, layer)) <= (1e-12 if form in EXACT else 0.01)
    module.offload = replace(CPU, min_tokens=1000, resident=True)
    assert isinstance(module.backend(9, plain=True), GpuResident)
    monkeypatch.setattr(
        "ktc.model.experts.backends.backend._ROWS", 8 * 2 * (70 + 37) * module.weights.packed.dtype.itemsize
    )
    assert isinstance(module.backend(8, plain=True), GpuResident)
    assert isinstance(module.backend(9, plain=True), CpuKernel)
    assert isinstance(module.backend(3), CpuKernel)


def test_few_tokens_of_resident_codes_are_those_of_the_kernel() -> None:
    module, layer = stored_experts(QUICK[0], 8, tokens=4)
    assert error(*resident_and_kernel(module, layer)) <= 0.01
    assert isinstance(module.backend(4, plain=True), GpuResident)
    assert isinstance(module.backend(5, plain=True), CpuKernel)  # copies of ten experts of eight


def resident_and_kernel(module: FusedMoe, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a layer whose experts are resident, and of the kernel."""
    x, weights = layer.x.to(module.weights.packed.dtype), layer.weights.to(module.weights.packed.weight_dtype)
    with torch.no_grad():
        wanted = module(x, layer.index, weights)
        module.offload = replace(CPU, min_tokens=1000, resident=True)
        return module(x, layer.index, weights), wanted


def test_resident_plain_experts_are_not_decoded_in_a_call(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(70, 37, 8, 2, 9)
    module = load(layer, spec_of(ISAS[0]))
    module.offload = replace(CPU, resident=True)
    trained = run(module, layer)
    monkeypatch.setattr(PackedLayout, "read", None)
    assert all(torch.equal(*both) for both in zip(run(module, layer), trained, strict=True))
    with torch.no_grad():
        assert error(module(layer.x.bfloat16(), layer.index, layer.weights.float()), trained[0]) <= 0.01


def test_resident_experts_are_on_a_device_once_whatever_the_size_of_the_ring(load: Load) -> None:
    packed = (module := load(random_layer(70, 37, 8, 2, 3), spec_of(ISAS[0]))).weights.packed
    assert packed is not None
    streams = {
        expert_stream(packed, module.form, CPU.devices[0], buffer, resident=True) for buffer in (1 << 20, 1 << 30)
    }
    assert len(streams) == 1
