"""fp64 explains errors of rounding, and none of stock code that computes something else in fp64."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from ktc.stages.proof import run
from ktc.stages.proof.cases import Call, Case, long_cases, overflow_cases
from ktc.stages.proof.types import TOLERANCE

SIZE = 8


class Halves(nn.Linear):
    """A layer that halves its result where a sum is beyond the largest number of fp32."""

    def forward(self, input: Tensor) -> Tensor:
        result = super().forward(input)
        return result * 0.5 if torch.isinf(input.abs().sum() * 1e30 * 1e9) else result


class Rounded(nn.Linear):
    """A layer that loses digits of fp32."""

    def forward(self, input: Tensor) -> Tensor:
        result = super().forward(input)
        return (result + 1e3) - 1e3


class _Pair:
    def __init__(self, stock: type[nn.Linear]) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._modules = [
                kind(SIZE, SIZE, bias=False, dtype=dtype) for dtype in _DTYPES for kind in (stock, nn.Linear)
            ]
        for module in self._modules:
            module.weight.data.copy_(self._modules[0].weight.data)

    def at(self, _: str) -> list[nn.Linear]:
        return self._modules[:2]

    def in_double(self, _: str) -> list[nn.Linear]:
        return self._modules[2:]


_DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize(("stock", "equal"), [(Halves, False), (Rounded, True)])
def test_fp64_explains_rounding_alone(stock: type[nn.Linear], equal: bool) -> None:
    hidden = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(0))
    case = Case("some tokens", Call((hidden,), {}), inference=True)
    pair = _Pair(stock)
    compared = run._compared("", cast("run._Pair", pair), case)
    assert (compared.worst <= TOLERANCE) == equal


def test_poisoned_inputs_are_compared_frozen_and_without_gradients() -> None:
    calls = [("two sequences", Call((torch.randn(2, 64, SIZE),), {}))]
    for cases in (long_cases(calls, 0), overflow_cases(calls)):
        found = [(case.frozen, case.inference) for case in cases if case.poisoned]
        assert {(False, False), (True, False), (False, True)} <= set(found)
