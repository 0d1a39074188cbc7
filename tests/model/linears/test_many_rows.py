"""The kernel for linear layers of many rows: output and gradient against fp64, and where a layer takes it."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_layers import LINEARS, QUICK_LINEARS, built, error, quick_or_slow
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ktc.foundation import host
from ktc.model.kernels.linear_spec import LinearSpec
from ktc.model.linears import choice, many_rows
from ktc.model.linears.choice import Choice
from ktc.model.linears.gemv import DTYPES
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.many_rows import ManyRows
from ktc.model.targets.kt_linear import LinearConfig
from ktc.model.targets.linear_module import linear_of_model

SPECS = LINEARS[::3]  # bf16
EACH = [quick_or_slow(spec, spec in QUICK_LINEARS, id=spec.entry) for spec in SPECS]
BOUND = 2.5e-3  # one rounding to bf16 is 1.7e-3
# Outputs and inputs: whole panels, a number short and beyond, less than a panel, more than a stretch of 256.
SHAPES = ((64, 96), (37, 70), (1, 1), (5, 15), (31, 33), (130, 257), (3, 600), (600, 3))
ROWS = (1, 4, 6, 11, 12, 13, 61)


def product(spec: LinearSpec, threads: int = 1) -> ManyRows:
    specs = QUICK_LINEARS if spec in QUICK_LINEARS else LINEARS
    return ManyRows(built(specs).kernel(spec.entry), threads, "packed")


def layer(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    x, weight, bias, grad = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    return x, weight, bias, grad


@pytest.mark.parametrize("spec", EACH)
def test_output_and_gradient_are_those_of_fp64(spec: LinearSpec) -> None:
    for outputs, inputs in SHAPES:
        for rows in ROWS:
            x, weight, bias, grad = layer(rows, outputs, inputs)
            wide = x.double().requires_grad_()
            for added in (bias, None):
                expected = functional.linear(wide, weight.double(), None if added is None else added.double())
                found = product(spec)(x.requires_grad_(), weight, added)
                assert (found.shape, found.dtype) == (expected.shape, torch.bfloat16)
                assert error(found.detach(), expected.detach()) <= BOUND, (outputs, inputs, rows)
                (ours,) = torch.autograd.grad(found, x, grad)
                (theirs,) = torch.autograd.grad(expected, wide, grad.double())
                assert error(ours, theirs) <= BOUND, (outputs, inputs, rows)


@pytest.mark.parametrize("spec", EACH)
def test_neither_threads_nor_other_rows_nor_a_repetition_change_a_bit(
    spec: LinearSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    for rows, outputs, inputs in ((205, 131, 303), (2, 70, 5), (1600, 33, 40)):  # of several blocks of rows, the last
        x, weight, bias, grad = layer(rows, outputs, inputs)
        for given, added, transposed in ((x, bias, False), (grad, None, True)):
            alone = product(spec).multiply(given, weight, added, transposed=transposed)
            for threads in (1, 2, 5):
                again = product(spec, threads).multiply(given, weight, added, transposed=transposed)
                assert torch.equal(again, alone), threads
            part = product(spec).multiply(given[1:2], weight, added, transposed=transposed)
            assert torch.equal(part, alone[1:2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_as_in_pytorch(value: float) -> None:
    x, weight, bias, _ = layer(13, 37, 70)
    for place, column in ((x, 69), (weight, 3)):
        before = place[1, column].clone()
        place[1, column] = value
        found, expected = product(SPECS[0])(x, weight, bias), functional.linear(x, weight, bias)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        place[1, column] = before


def test_weights_need_no_alignment() -> None:
    x, weight, bias, grad = layer(14, 35, 51)
    shifted = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view_as(weight)
    for given, added, transposed in ((x, bias, False), (grad, None, True)):
        both = [product(SPECS[0]).multiply(given, each, added, transposed=transposed) for each in (weight, shifted)]
        assert torch.equal(*both)


def frozen(bias: bool = False, size: int = 256) -> FusedLinear:
    torch.manual_seed(0)
    stock = nn.Linear(size, size, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    return FusedLinear.from_linear(stock, prefill_kernel=product(SPECS[0]))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    multiply = ManyRows.multiply

    def count(self: ManyRows, *args: Any, transposed: bool = False) -> Tensor:
        calls.append(transposed)
        return multiply(self, *args, transposed=transposed)

    monkeypatch.setattr(ManyRows, "multiply", count)
    return calls


def test_a_recorded_step_repeats_the_product_on_other_values() -> None:
    ours, x, calls = frozen(bias=True), torch.randn(12, 256).bfloat16(), []
    with torch.no_grad(), ours.step_context.entered(recorder=calls.append):
        ours(x)
    (call,) = calls
    other, out = torch.randn(12, 256).bfloat16(), torch.empty(12, 256, dtype=torch.bfloat16)
    bound = call.bind((other, *call.reads[1:]), out)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bound.function)(bound.address)
    bound.rethrow()
    with torch.no_grad():
        assert torch.equal(out, ours(other))


@pytest.mark.parametrize("spec", [spec for spec in QUICK_LINEARS if spec.dtype != "bf16"], ids=str)
def test_weights_of_other_dtypes_are_multiplied_by_pytorch(spec: LinearSpec) -> None:
    stock = nn.Linear(256, 256, dtype=DTYPES[spec.dtype]).requires_grad_(False)
    kernel = built(QUICK_LINEARS).kernel(spec.entry)
    for many in ("auto", "packed"):
        made = linear_of_model(stock, LinearConfig(1, "gemv", many, None), kernel)
        x = torch.randn(16, 256).to(DTYPES[spec.dtype])
        assert torch.equal(made(x), stock(x))


def test_a_layer_takes_the_kernel_for_many_rows_and_frozen_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ours, x = counted(monkeypatch), frozen(bias=True), torch.randn(12, 256).bfloat16()
    for mode in (True, False):
        ours.train(mode)(x)
        with torch.no_grad():
            ours(x.view(3, 4, 256))
    assert len(calls) == 4
    ours(x[:8])
    ours.double()(x.double())
    ours.bfloat16().requires_grad_(True)(x)
    frozen(size=70)(torch.randn(12, 70).bfloat16())  # small
    assert len(calls) == 4
    with torch.no_grad():
        ours(x)
    assert len(calls) == 5


def test_autocast_changes_nothing_in_the_kernel_and_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ours, x = counted(monkeypatch), frozen(), torch.randn(16, 256)
    stock = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    stock.weight = ours.weight
    results: list[tuple[Tensor, Tensor]] = []
    for module in (ours, stock):
        wide = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found = module(wide)
            (gradient,) = torch.autograd.grad(found.float().square().sum(), wide)
        results.append((found, gradient))
    assert calls == [False, True]
    for ours_, theirs in zip(*results, strict=True):
        assert ours_.dtype == theirs.dtype
        assert error(ours_.detach(), theirs.detach().double()) <= 4e-3
    with torch.autocast("cpu", torch.float16):
        ours(x)
    assert len(calls) == 2


def test_under_peft_and_checkpoints_it_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj: nn.Module = frozen()

        def forward(self, x: Tensor) -> Tensor:
            return self.q_proj(x)

    calls, torch_seed = counted(monkeypatch), 3
    torch.manual_seed(torch_seed)
    model = get_peft_model(One(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))  # type: ignore[arg-type]
    x = torch.randn(20, 256).bfloat16().requires_grad_()
    gradients: list[list[Tensor]] = []
    for reentrant in (None, True, False):
        out = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        trained = [x, *(each for each in model.parameters() if each.requires_grad)]
        for each in trained:
            each.grad = None
        out.float().square().sum().backward()
        gradients.append([each.grad.clone() for each in trained if each.grad is not None])
    assert len(calls) == 2 + 3 + 3
    assert all(torch.equal(*pair) for other in gradients[1:] for pair in zip(gradients[0], other, strict=True))


def test_the_faster_product_is_taken_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    calls, ours, x = counted(monkeypatch), frozen(), torch.randn(12, 256).bfloat16()
    assert ours.prefill_kernel is not None
    ours.prefill_kernel = replace(ours.prefill_kernel, product="auto")
    for speeds, expected in (((30.0, 120.0), 1), ((100.0, 110.0), 0), ((400.0, 120.0), 0)):
        many_rows._choice.cache_clear()
        monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / str(speeds[0])))
        monkeypatch.setattr(choice, "_measured", lambda *_, speeds=speeds: Choice(*speeds))
        calls.clear()
        with caplog.at_level(logging.INFO, "ktc.model.linears.choice"):
            ours(x)
        assert len(calls) == expected
    many_rows._choice.cache_clear()
    assert "packed (torch 30 GFLOP/s, packed 120" in caplog.messages[0]
    assert "torch (torch 400 GFLOP/s" in caplog.messages[2]


def test_a_later_process_chooses_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path))
    first = choice.kept_choice("a kernel", lambda: Choice(100.0, 120.0))
    assert choice.kept_choice("a kernel", lambda: Choice(100.0, 110.0)) == first
    assert choice.kept_choice("another", lambda: Choice(1.0, 2.0)) == Choice(1.0, 2.0)
    (kept,) = [path for path in tmp_path.rglob("*.json") if "120" in path.read_text()]
    kept.write_text("{}")
    assert choice.kept_choice("a kernel", lambda: Choice(100.0, 110.0)) == Choice(100.0, 110.0)


def test_a_measurement_has_two_speeds() -> None:
    assert min(choice.predicted_choice().torch, choice.measured_choice(product(SPECS[0]).multiply).other) > 0
