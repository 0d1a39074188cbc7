"""A linear layer in a file's blocks: against fp64, its gradient, and what is refused; sizes as the plan counts them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from kernel_layers import built, error, quick_or_slow
from peft import LoraConfig, inject_adapter_in_model
from refresh_cycle import assert_cycle
from torch import Tensor, nn

from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import host
from ktc.foundation.formats import BLOCKS
from ktc.model.experts.products import grouped_products
from ktc.model.experts.references.block_reference import dequantise_blocks, random_blocks
from ktc.model.kernels.fused_moe_spec import KERNELS
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.kernels.packed_size import packed_linear_bytes
from ktc.model.linears import coded_row_kernels, coded_weight, stored_linear
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.loading import refresh
from ktc.model.packed_store.memory import tensor_bytes

HERE = host.detect().isas
BEST = HERE[0]
CODED = tuple(name for name, row in BLOCKS.items() if row.coded)
SPECS = tuple(
    PackedLinearSpec("packed_linear", "bf16", name, isa) for isa in HERE for name in CODED if name in KERNELS[isa]
)
QUICK = tuple(spec for spec in SPECS if spec.isa == BEST and spec.weight_format in ("q8_0", "q4_k"))
EACH = [quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in SPECS]
pytestmark = pytest.mark.skipif(host.find_compiler() is None, reason="needs a C++ compiler")


def layer(
    spec: PackedLinearSpec, outputs: int, blocks: int, *, bias: bool = True, slow: bool = False
) -> tuple[StoredLinear, Tensor]:
    """A layer and its weights in fp32."""
    inputs = blocks * BLOCKS[spec.weight_format].weights
    generator = torch.Generator().manual_seed(outputs)
    stored = random_blocks(outputs, inputs, spec.weight_format, 0.05, generator)
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    if bias:
        linear.bias = nn.Parameter(torch.randn(outputs, generator=generator).bfloat16(), requires_grad=False)
    kernel = built(SPECS if slow else QUICK).kernel(spec.entry)
    made = StoredLinear.from_linear(linear, kernel, spec.weight_format, 1)
    made.load_blocks(stored)
    return made, dequantise_blocks(stored, spec.weight_format)


@pytest.mark.parametrize("spec", EACH)
def test_the_output_is_that_of_the_stored_weights(spec: PackedLinearSpec, request: pytest.FixtureRequest) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    for outputs, blocks, bias in ((64, 2, True), (37, 1, True), (33, 3, False)):
        made, weight = layer(spec, outputs, blocks, bias=bias, slow=slow)
        assert made.packed_bytes == packed_linear_bytes(spec, outputs, made.in_features)
        assert torch.equal(made.dequantised(), weight.bfloat16())
        for rows in (0, 1, 2, 5, 8, 9, 50):
            x = torch.randn(rows, made.in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
            added = 0 if made.bias is None else made.bias.double()
            found = made(x)
            assert found.shape == (rows, outputs) and found.dtype == torch.bfloat16
            assert rows == 0 or error(found, x.double() @ weight.double().T + added) <= 4e-3


def test_the_gradient_is_that_of_the_input_and_adapters_train() -> None:
    made, weight = layer(QUICK[0], 64, 2)
    x = torch.randn(2, 3, made.in_features).bfloat16().requires_grad_()
    grad = torch.randn(2, 3, 64).bfloat16()
    (found,) = torch.autograd.grad(made(x), x, grad)
    assert error(found, grad.double() @ weight.double()) <= 6e-3
    model = nn.ModuleDict({"proj": made})
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False), model)
    wrapped = model["proj"]
    out = wrapped(x.detach())
    assert not torch.equal(out, made(x.detach()))
    out.sum().backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("input_trains", [False, True])
def test_a_bias_trains(input_trains: bool) -> None:
    made, weight = layer(QUICK[0], 64, 2)
    model = nn.ModuleDict({"proj": made})
    model.requires_grad_(requires_grad=False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"], bias="all"), model)
    assert made.bias.requires_grad
    x = torch.randn(2, 3, made.in_features).bfloat16().requires_grad_(input_trains)
    grad = torch.randn(2, 3, 64).bfloat16()
    made(x).backward(grad)
    assert made.bias.grad is not None and made.bias.grad.dtype == made.bias.dtype
    assert error(made.bias.grad, grad.double().sum((0, 1))) <= 4e-3
    assert (x.grad is not None) == input_trains
    assert x.grad is None or error(x.grad, grad.double() @ weight.double()) <= 6e-3
    vector = torch.randn(made.in_features).bfloat16()  # without leading dimensions
    made.zero_grad()
    made(vector).sum().backward()
    assert torch.equal(made.bias.grad, torch.ones_like(made.bias))


@pytest.mark.parametrize("spec", EACH)
def test_blocks_are_replaced_where_they_are(spec: PackedLinearSpec, request: pytest.FixtureRequest) -> None:
    made, _ = layer(spec, 64, 2, slow=request.node.get_closest_marker("slow") is not None)
    generator = torch.Generator().manual_seed(64)
    stored = random_blocks(64, made.in_features, spec.weight_format, 0.05, generator)
    x = torch.randn(3, made.in_features, generator=generator).bfloat16()
    assert made.packed is not None
    assert_cycle(made, lambda: made.load_blocks(stored), lambda: made(x), made.packed.data_ptr)


def test_bands_of_rows_are_packed_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QUICK[0]
    whole, _ = layer(spec, 100, 2)
    monkeypatch.setattr(stored_linear, "_BAND", 32)
    in_bands, _ = layer(spec, 100, 2)
    assert whole.packed is not None and in_bands.packed is not None
    assert torch.equal(in_bands.packed, whole.packed)


def test_what_would_need_the_values_is_refused() -> None:
    made, _ = layer(QUICK[0], 64, 2)
    assert (made.weight.shape, made.weight.dtype) == ((64, made.in_features), torch.bfloat16)
    assert "weight" not in dict(made.named_parameters()) and f"{QUICK[0].weight_format} as stored" in repr(made)
    with pytest.raises(InputRefused, match="L448"):
        made.weight + 1
    with pytest.raises(InputRefused, match="L449"):
        copy.deepcopy(made)
    with pytest.raises(RuntimeError, match="multiplies bf16, found"):
        made(torch.ones(1, made.in_features))
    with pytest.raises(RuntimeError, match="multiplied on the CPU, found an input on `meta`"):
        made(torch.ones(1, made.in_features, dtype=torch.bfloat16, device="meta"))
    made.device = torch.device("cuda:0")
    with pytest.raises(RuntimeError, match="on `cuda:0`, found an input on `cuda:1`"):
        made(SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda:1")))
    made.device = torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert made(torch.ones(1, made.in_features)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="expected blocks of 64 rows"):
        made.load_blocks(torch.zeros(3, 34, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no whole blocks"):
        made.load_blocks(torch.zeros(64, 35, dtype=torch.uint8))


ON_GPU = [quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in SPECS if spec.isa == BEST]


# On a GPU ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on the CPU take the code of a GPU, whose kernels Triton's interpreter runs."""
    monkeypatch.setattr(StoredLinear, "_on_gpu", True)
    monkeypatch.setattr(grouped_products, "multiplies_codes", lambda device: True)
    monkeypatch.setattr(coded_weight, "MOST_ROWS", 8)
    monkeypatch.setattr(coded_weight, "_LARGE", 0)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize(
    "spec", [quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in SPECS if spec.isa == BEST]
)
def test_a_gpu_multiplies_the_same_bytes(
    spec: PackedLinearSpec, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    for outputs, blocks, bias, lanes in ((64, 2, True, 8), (37, 1, False, 32)):
        monkeypatch.setattr(coded_row_kernels, "_FEW", {"LANES": lanes, "BLOCKS": 4, "num_warps": 4})
        made, weight = layer(spec, outputs, blocks, bias=bias, slow=slow)
        assert error(made.dequantised(), weight) <= 4e-3
        for rows in (0, 1, 4, 7, 9):  # one by one, in tiles, and with a decoded weight
            x = torch.randn(rows, made.in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
            added = 0 if made.bias is None else made.bias.double()
            out = made(x)
            assert out.shape == (rows, outputs) and out.dtype == torch.bfloat16
            assert rows == 0 or error(out, x.double() @ weight.double().T + added) <= 8e-3


@pytest.mark.usefixtures("as_on_gpu")
def test_a_gpu_computes_gradients_and_new_blocks_in_the_same_memory() -> None:
    made, weight = layer(QUICK[0], 64, 2)
    x, grad = torch.randn(3, made.in_features).bfloat16().requires_grad_(), torch.randn(3, 64).bfloat16()
    (of_input,) = torch.autograd.grad(made(x), x, grad)
    assert error(of_input, grad.double() @ weight.double()) <= 8e-3
    assert made.packed is not None
    address, other = made.packed.data_ptr(), random_blocks(64, made.in_features, made.format, 0.05, torch.Generator())
    made.load_blocks(other)
    assert made.packed.data_ptr() == address
    assert error(made.dequantised(), dequantise_blocks(other, made.format)) <= 4e-3


def test_staged_blocks_of_a_gpu_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = layer(QUICK[0], 64, 2)
    with torch.device("meta"):
        linear = nn.Linear(made.in_features, 64, bias=False, dtype=torch.bfloat16)
    staged = StoredLinear.from_linear(linear, made.kernel, made.format, 1, torch.device("meta"))  # as a GPU
    monkeypatch.setattr(refresh, "_require_refreshable", lambda model: None)
    monkeypatch.setattr(refresh, "_shell", lambda model: nn.ModuleDict({"proj": staged}))
    refresh.Stage.for_model(nn.ModuleDict({"proj": made}))
    other = random_blocks(64, made.in_features, made.format, 0.05, torch.Generator().manual_seed(1))
    staged.load_blocks(other)
    assert staged.packed is not None and staged.packed.device.type == "cpu"
    assert tensor_bytes(nn.ModuleDict({"proj": staged}), {}) == {"cpu": staged.packed_bytes}
    made.copy_from(staged)
    assert torch.equal(made.dequantised(), dequantise_blocks(other, made.format).bfloat16())


def test_products_on_a_gpu_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(grouped_products, "multiplies_codes", lambda device: True)
    coded_weight.check_linear.__wrapped__("mxfp4", device)
    monkeypatch.setattr(coded_row_kernels, "rows_times", lambda x, matrix, bias: x.new_zeros(len(x), matrix.rows))
    with pytest.raises(HostLacks, match="H247"):
        coded_weight.check_linear.__wrapped__("mxfp4", device)


def test_without_triton_pytorch_decodes_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredLinear, "_on_gpu", True)
    made, weight = layer(QUICK[0], 37, 2)
    assert torch.equal(made.dequantised(), weight.bfloat16())
    x = torch.randn(2, made.in_features).bfloat16()
    assert error(made(x), x.double() @ weight.double().T + made.bias.double()) <= 8e-3


def test_a_gpu_without_triton_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grouped_products, "multiplies_codes", lambda _: False)
    for name in ("q8_0", "q4_k"):
        coded_weight.check_linear.__wrapped__(name, torch.device("cuda:7"))
    assert ["L469" in message for message in caplog.messages] == [True]
