"""The kernel for linear layers of few rows: against fp64, and the properties that hold to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_layers import LINEARS, QUICK_LINEARS, built, error, quick_or_slow
from torch import Tensor
from torch.nn import functional

from ktc.diagnostics import KtcError
from ktc.foundation import host
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.kernels.linear_spec import LinearSpec
from ktc.model.linears.gemv import DTYPES, ROWS, Gemv
from ktc.model.linears.lora_linear import KTLinear
from ktc.stages.codegen import self_test_linear
from ktc.stages.codegen.render import KernelSource, render

SPECS, QUICK = LINEARS, QUICK_LINEARS
EACH = [quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in SPECS]
BOUNDS = {"bf16": 3e-3, "fp16": 1e-3, "fp32": 1e-6}
# Outputs and inputs: whole lanes, one number short and beyond, less than lanes, more than a worker takes at once,
# several stretches of inputs for three rows, and for one.
SHAPES = ((64, 96), (37, 70), (1, 1), (5, 15), (17, 16), (16, 17), (130, 33), (3, 1000), (19, 2099), (3, 8300))


@pytest.fixture(scope="module")
def source() -> KernelSource:
    return render(QUICK, dict.fromkeys(QUICK, "tests/model/linears/test_kernel.py:1:1"))


@pytest.fixture
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return built(SPECS if request.node.get_closest_marker("slow") else QUICK)


def gemv(library: KernelLibrary, spec: LinearSpec, threads: int = 1) -> Gemv:
    return Gemv(library.kernel(spec.entry), threads)


def layer(spec: LinearSpec, rows: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(size, generator=generator).to(DTYPES[spec.dtype]) for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", EACH)
def test_the_output_is_that_of_the_product_in_fp64(
    library: KernelLibrary, spec: LinearSpec, shape: tuple[int, int]
) -> None:
    for rows in range(9):
        x, weight, bias = layer(spec, rows, *shape)
        for added in (bias, None):
            found = gemv(library, spec)(x, weight, added)
            expected = functional.linear(x.double(), weight.double(), None if added is None else added.double())
            assert (found.shape, found.dtype) == (expected.shape, x.dtype)
            assert rows == 0 or error(found, expected) <= BOUNDS[spec.dtype]


@pytest.mark.parametrize("spec", EACH)
def test_neither_threads_nor_other_rows_change_a_bit(
    library: KernelLibrary, spec: LinearSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    monkeypatch.setattr("ktc.model.linears.gemv._BYTES_PER_THREAD", 1)
    for shape in ((131, 203), (37, 4200)):  # 4,200 inputs are two stretches for one row and five for four
        x, weight, bias = layer(spec, 8, *shape)
        alone = gemv(library, spec)(x, weight, bias)
        for threads in (2, 3, 5):
            assert torch.equal(gemv(library, spec, threads)(x, weight, bias), alone), threads
        for row in range(8):
            assert torch.equal(gemv(library, spec)(x[row : row + 1], weight, bias)[0], alone[row]), row


@pytest.mark.parametrize("spec", EACH[:3])
def test_an_output_of_no_inputs_is_its_bias(library: KernelLibrary, spec: LinearSpec) -> None:
    for rows in range(1, 9):
        x, weight, bias = layer(spec, rows, 37, 0)
        assert torch.equal(gemv(library, spec)(x, weight, bias), bias.expand(rows, 37))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_instruction_set_gives_nearly_the_same(library: KernelLibrary, dtype: str) -> None:
    specs = [spec for spec in SPECS if spec.dtype == dtype]
    x, weight, bias = layer(specs[0], 5, 70, 333)
    results = [gemv(library, spec)(x, weight, bias) for spec in specs]
    assert all(error(result, results[-1].double()) <= BOUNDS[dtype] for result in results)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spec", EACH)
def test_what_is_not_finite_spreads_as_in_pytorch(library: KernelLibrary, spec: LinearSpec, value: float) -> None:
    x, weight, bias = layer(spec, 3, 37, 70)
    clean = gemv(library, spec)(x, weight, bias)
    for place, column in ((x, 69), (weight, 3)):
        before = place[1, column].clone()
        place[1, column] = value
        found, expected = gemv(library, spec)(x, weight, bias), functional.linear(x, weight, bias)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        untouched = expected.isfinite()
        assert torch.equal(found[untouched], clean[untouched])
        place[1, column] = before


def test_what_is_too_large_for_fp16_becomes_infinite(library: KernelLibrary) -> None:
    for spec in (spec for spec in QUICK if spec.dtype == "fp16"):
        x, weight = torch.full((2, 40), 200.0).half(), torch.full((3, 40), 60.0).half()
        found = gemv(library, spec)(torch.stack([x[0], -x[1]]), weight, None)
        assert found.tolist() == [[float("inf")] * 3, [float("-inf")] * 3]
        tiny = torch.full((2, 1), 2.0**-20).half()
        assert torch.equal(gemv(library, spec)(tiny, tiny.new_ones(3, 1), None), tiny.expand(2, 3))  # a denormal


def test_weights_need_no_alignment(library: KernelLibrary) -> None:
    for spec in QUICK:
        x, weight, bias = layer(spec, 2, 9, 50)
        shifted = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(9, 50)
        assert torch.equal(gemv(library, spec)(x, shifted, bias), gemv(library, spec)(x, weight, bias))


@pytest.mark.parametrize("spec", EACH[:3])
def test_a_layer_takes_the_kernel_for_few_rows_without_gradients_only(library: KernelLibrary, spec: LinearSpec) -> None:
    linear = torch.nn.Linear(70, 37, dtype=DTYPES[spec.dtype]).requires_grad_(False)
    decode = gemv(library, spec)
    fewest, most = ROWS[spec.dtype]

    def served(x: Tensor) -> bool:
        return decode.serves(x, linear.weight, linear.bias)

    x = layer(spec, most, 37, 70)[0]
    assert not served(x)
    with torch.no_grad():
        assert [served(x[:rows]) for rows in range(most + 1)] == [fewest <= rows for rows in range(most + 1)]
        assert not served(layer(spec, most + 1, 37, 70)[0])
        assert served(x.view(2, most // 2, 70))
        assert not served(x.double())
        assert not decode.serves(x, torch.randn(70, 37).to(x.dtype).T, None)
        with torch.autocast("cpu", torch.bfloat16):
            assert not served(x)


def test_a_layer_in_training_is_pytorchs_and_its_gradients_too(library: KernelLibrary) -> None:
    stock = torch.nn.Linear(70, 37, dtype=torch.bfloat16)
    ours = KTLinear.from_linear(stock, gemv(library, SPECS[0]))
    x = torch.randn(4, 70).bfloat16().requires_grad_()
    assert torch.equal(ours(x), functional.linear(x, stock.weight, stock.bias))
    (ours_grad,) = torch.autograd.grad(ours(x).sum(), x)
    (stock_grad,) = torch.autograd.grad(stock(x).sum(), x)
    assert torch.equal(ours_grad, stock_grad)
    with torch.no_grad():
        assert torch.equal(ours(x), functional.linear(x, stock.weight, stock.bias))  # in training mode still
        ours.eval()
        assert error(ours(x), stock.double()(x.double())) <= BOUNDS["bf16"]
        stock.bfloat16()
        ours.weight.data += 1  # as merging an adapter does
        assert error(ours(x), functional.linear(x.double(), ours.weight.double(), ours.bias.double())) <= 3e-3


def test_a_compiled_layer_is_traced_as_pytorchs(library: KernelLibrary) -> None:
    ours = KTLinear.from_linear(torch.nn.Linear(70, 37, dtype=torch.bfloat16), gemv(library, SPECS[0])).eval()
    x = torch.randn(2, 70).bfloat16()
    with torch.no_grad():
        program = torch.export.export(ours, (x,))
        assert any("linear" in str(node.target) for node in program.graph.nodes)


def test_a_wrong_kernel_is_found(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test_linear, "TOLERANCE", {"bf16": 1e-9})
    with pytest.raises(KtcError, match=r"H225.*Linear_bf16"):
        self_test_linear.self_test_linear(library.kernel(SPECS[0].entry), SPECS[0])


def test_rendering_depends_on_neither_order_nor_repeats(source: KernelSource, tmp_path: Path) -> None:
    again = render((*reversed(QUICK), QUICK[0]), dict.fromkeys(QUICK, "tests/model/linears/test_kernel.py:1:1"))
    assert again == source
    other = replace(SPECS[0], dtype="fp32")
    assert render([other], {}).entries == ((other.entry, "fp32"),)
