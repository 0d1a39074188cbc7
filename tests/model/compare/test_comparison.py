"""One comparison for all users: refusals of stock end a case, others are differences, fp64 decides about rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ktc.model.compare.comparison import Comparison, Values, compare, decided

X = torch.linspace(1, 2, 64)


def raises() -> Values:
    raise ValueError("no such branch\nsecond line")


def test_an_exception_of_stock_ends_the_case_and_one_of_the_other_side_is_a_difference() -> None:
    refused, raised = compare(raises, raises), compare(lambda: {"output": X}, raises)
    assert (refused.refused, refused.raised, refused.worst) == ("ValueError: no such branch", "", 0.0)
    assert (raised.refused, raised.raised, raised.worst) == ("", "ValueError: no such branch", math.inf)


def test_a_result_without_data_is_a_difference() -> None:
    assert compare(lambda: {"output": X}, lambda: {"output": X.to("meta")}).raised


def test_values_of_one_side_alone_are_named_and_count_as_zero() -> None:
    compared = compare(lambda: {"output": X, "old": 0 * X}, lambda: {"output": X, "new": X})
    assert (compared.errors, compared.alone, compared.differing) == (
        {"output": 0.0, "old": 0.0, "new": math.inf},
        ("old", "new"),
        "new",
    )


def test_errors_may_be_relative_to_a_least_norm() -> None:
    small = 1e-3 * X
    floor = float(X.norm())
    assert compare(lambda: {"output": small}, lambda: {"output": 0 * X}).worst == pytest.approx(1.0)
    assert compare(lambda: {"output": small}, lambda: {"output": 0 * X}, lambda _: lambda _: floor).worst < 2e-3


class Rounded(nn.Module):
    """Loses digits of fp32."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(factor))

    def forward(self) -> Tensor:
        x = X.to(self.scale.dtype) * self.scale
        return (x + 1e4) - 1e4


class Single(Rounded):
    """Does not run in fp64."""

    def forward(self) -> Tensor:
        assert self.scale.dtype == torch.float32
        return super().forward()


class Exact(Rounded):
    """Computes the same without the loss."""

    def forward(self) -> Tensor:
        return X.to(self.scale.dtype) * self.scale


def case(stock: nn.Module, other: nn.Module) -> Comparison:
    return compare(lambda: {"output": stock().detach()}, lambda: {"output": other().detach()})


@pytest.mark.parametrize(
    ("stock", "other", "differs"),
    [(Rounded, Exact, False), (Rounded, partial(Exact, 1.01), True), (Single, Exact, True)],
)
def test_rounding_alone_is_explained_in_fp64(
    stock: Callable[[], nn.Module], other: Callable[[], nn.Module], differs: bool
) -> None:
    single = case(stock(), other())
    assert single.open
    exact = decided(single, case, lambda: (stock().double(), other().double()))
    assert bool(exact.differing) == differs
    assert (exact is single) == (stock is Single)


def test_sides_that_cannot_be_made_in_fp64_are_a_difference() -> None:
    def fail() -> tuple[nn.Module, nn.Module]:
        raise RuntimeError("cannot be put in place")

    assert decided(case(Rounded(), Exact()), case, fail).raised == "RuntimeError: cannot be put in place"
    equal = case(Exact(), Exact())
    assert decided(equal, case, fail) is equal
