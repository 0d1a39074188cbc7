"""A program computes what was recorded, in every later run, on every instruction set, in little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_layers import ISAS, built, quick_or_slow
from torch import Tensor
from torch.nn import functional

from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.linear_spec import ISAS as LINEAR_ISAS
from ktc.model.kernels.step_spec import StepSpec
from ktc.model.steps import lowering
from ktc.model.steps.program import StepProgram, close, record_program

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = [StepSpec("step", "fp32", isa) for isa in LINEAR_ISAS if isa in ISAS]


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return built((SPECS[0],)).kernel(SPECS[0].entry)


def programmed(
    kernel: Kernel, compute: Callable[[], Any], *changing: Tensor
) -> tuple[StepProgram, tuple[Tensor, ...]]:  # fmt: skip
    _, program, results = record_program(compute, changing, kernel, 1, lambda out: out)
    return program, results


# The self-test, which every build runs, compares every operation in every dtype with PyTorch.
@pytest.mark.parametrize("spec", [quick_or_slow(s, s in (SPECS[0], SPECS[-1]), id=s.entry) for s in SPECS])
def test_every_instruction_set_computes_every_operation(spec: StepSpec) -> None:
    assert built((spec,)).kernel(spec.entry).step() is not None


def test_a_later_run_computes_with_new_values(kernel: Kernel) -> None:
    x, weight = torch.randn(2, 40), torch.randn(7, 40)

    def compute() -> tuple[Tensor, ...]:
        scores = functional.softmax(functional.linear(x, weight), dim=-1)
        return scores, *torch.topk(scores, 3)

    program, results = programmed(kernel, compute, x)
    assert not program.foreign
    for seed in range(3):
        x.copy_(torch.randn(2, 40, generator=torch.Generator().manual_seed(seed)))
        program.run()
        assert all(close(found, expected) for found, expected in zip(results, compute(), strict=True))


def test_an_operation_without_a_native_form_is_pytorchs(kernel: Kernel) -> None:
    x = torch.randn(3, 5)
    program, (result,) = programmed(kernel, lambda: (torch.cumsum(x * 2, dim=-1) + 1,), x)
    assert program.foreign == ("aten.cumsum.default",)
    x.copy_(torch.randn(3, 5))
    program.run()
    assert close(result, torch.cumsum(x * 2, dim=-1) + 1)


def test_memory_is_used_again(kernel: Kernel) -> None:
    x = torch.randn(1000)

    def compute() -> tuple[Tensor, ...]:
        found = x
        for _ in range(50):
            found = found * 1.01
        return (found,)

    program, (result,) = programmed(kernel, compute, x)
    assert program.nbytes < 3 * 4 * 1024 + 64
    x.fill_(1.0)
    program.run()
    assert close(result, compute()[0])


def test_a_result_is_not_written_by_what_follows(kernel: Kernel) -> None:
    x = torch.randn(100)

    def compute() -> tuple[Tensor, ...]:
        first = x * 2
        return first, ((x + 1) * 3).neg()

    program, (first, _) = programmed(kernel, compute, x)
    program.run()
    assert torch.equal(first, x * 2)


def test_views_of_any_strides_are_read_and_written(kernel: Kernel) -> None:
    x, y = torch.randn(5, 3, 7), torch.randn(7, 1, 5)
    cache = torch.zeros(2, 7, 11)
    place = torch.tensor([4])

    def compute() -> tuple[Tensor, ...]:
        cache.index_copy_(2, place, (x[:2, 1, :].unsqueeze(-1) + 1)[:, :7])
        return x.permute(2, 1, 0) * y, x[::2, :, 1::3].transpose(0, 2).contiguous(), cache * 1, (x > 0) & (x < 1)

    program, results = programmed(kernel, compute, x, y, cache, place)
    x.copy_(torch.randn(5, 3, 7))
    place.fill_(9)
    program.run()
    assert all(torch.equal(found, expected) for found, expected in zip(results, compute(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_numbers_are_compared_in_the_dtype_of_the_tensor(kernel: Kernel, dtype: torch.dtype) -> None:
    x, one = torch.tensor([0.1, -0.1, 0.3, 2.0]).to(dtype), torch.tensor(0.1)

    def compute() -> tuple[Tensor, ...]:
        return x > 0.1, x == 0.1, x >= 0.3, x <= -0.1, x != 2, x > one, x * one, x - 0.1, x * 3

    program, results = programmed(kernel, compute, x, one)
    x.copy_(torch.tensor([0.3, 0.1, 0.1, -0.1]).to(dtype))
    one.fill_(0.3)
    program.run()
    assert all(torch.equal(found, expected) for found, expected in zip(results, compute(), strict=True))


def test_values_that_a_step_repeats_are_read(kernel: Kernel) -> None:
    x = torch.randn(2, 3)

    def compute() -> tuple[Tensor, ...]:
        wide = (x * 2)[:, None].expand(2, 4, 3)
        return wide * 1.5, torch.cat((wide, wide), 1)

    program, results = programmed(kernel, compute, x)
    x.copy_(torch.randn(2, 3))
    program.run()
    assert all(torch.equal(found, expected) for found, expected in zip(results, compute(), strict=True))


def test_products_of_many_rows_are_pytorchs(kernel: Kernel) -> None:
    x, weight = torch.randn(9, 40), torch.randn(40, 50)
    assert programmed(kernel, lambda: (x @ weight,), x)[0].foreign == ("aten.mm.default",)
    assert not programmed(kernel, lambda: (x[:8] @ weight,), x)[0].foreign


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.softmax(x.sum(), dim=0), lambda x: x.sum().gather(0, torch.tensor(0)),
        lambda x: torch.cat((x, torch.empty(0))), lambda x: x.gather(0, torch.tensor([1], dtype=torch.int32)),
    ],
)  # fmt: skip
def test_what_a_native_form_does_not_take_is_pytorchs(kernel: Kernel, compute: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4)
    program, (result,) = programmed(kernel, lambda: (compute(x),), x)
    x.copy_(torch.randn(4))
    program.run()
    assert close(result, compute(x))


def test_columns_are_selected_for_pairs_of_rows_and_places(kernel: Kernel) -> None:
    present, rows = torch.tensor([[1, 0, 1], [0, 1, 1]]), torch.arange(2)[:, None, None, None]
    columns, flags = torch.tensor([2, 0])[None, None, None], torch.tensor([[True, False, False], [False, True, True]])

    def compute() -> tuple[Tensor, ...]:
        return present[rows, columns], flags[rows, columns], flags[rows[:1], columns]

    program, results = programmed(kernel, compute, present, rows, columns, flags)
    assert program.foreign == ()
    present.copy_(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    columns.copy_(torch.tensor([1, 2]))
    program.run()
    assert all(torch.equal(found, expected) for found, expected in zip(results, compute(), strict=True))


def test_an_index_out_of_range_is_an_error(kernel: Kernel) -> None:
    table, ids = torch.randn(4, 3), torch.tensor([1, 3])
    program, _ = programmed(kernel, lambda: (functional.embedding(ids, table),), ids)
    ids[1] = 4
    with pytest.raises(IndexError, match="index 4 is out of range"):
        program.run()


def test_a_native_form_with_other_values_is_refused(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    monkeypatch.setitem(lowering._LOWERED, "mul", lowering._LOWERED["add"])
    with pytest.raises(ValueError, match=r"native form of `aten\.mul\.Tensor` computes other values"):
        programmed(kernel, lambda: (x * 3,), x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinities_are_those_of_pytorch(kernel: Kernel, value: float) -> None:
    x = torch.tensor([1.0, value, -2.0, 0.0])

    def compute() -> tuple[Tensor, ...]:
        wide = functional.softmax(x, dim=-1), x.exp(), functional.silu(x), x.amax(dim=(0,)), torch.maximum(x, -x)
        return *wide, x.to(torch.bfloat16), x.clamp(-1, 1), *torch.topk(x, 2)

    program, results = programmed(kernel, compute, x)
    program.run()
    for found, expected in zip(results, compute(), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert close(found.nan_to_num(), expected.nan_to_num())
