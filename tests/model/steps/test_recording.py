"""A recording holds what later runs have to repeat, and refuses what no later run could repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ktc.model.kernels.kernel_calls import HostCall, announce
from ktc.model.steps.recording import record


def names(compute: Callable[[], Any], *changing: Tensor) -> list[str]:
    return [operation.name.split(".")[1] for operation in record(compute, changing).operations]


def test_what_depends_on_no_changing_value_is_computed_once() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    assert names(lambda: x @ (weight.float() * 2).t() + torch.arange(4), x) == ["mm", "add"]


def test_views_are_no_operations() -> None:
    x = torch.randn(3, 4)
    assert names(lambda: x.view(2, 6)[:, 1:3].t().unsqueeze(0) * 2, x) == ["mul"]


def test_memory_that_is_written_twice_is_written_in_every_run() -> None:
    x = torch.randn(3)
    assert names(lambda: torch.zeros(3).add_(1) * x, x) == ["zeros", "add_", "mul"]


def test_what_changes_a_changing_tensor_is_repeated() -> None:
    cache, place = torch.zeros(1, 4), torch.tensor([2])
    assert names(lambda: cache.index_copy_(1, place, torch.ones(1, 1)), cache, place) == ["index_copy_"]


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x if x.sum() > 0 else -x, "into Python"),
        (lambda x: x * float(x[0]), "into Python"),
        (lambda x: x[x > 0], "depend on values"),
        (lambda x: x.nonzero(), "depend on values"),
        (lambda x: x + torch.randn(4), "random"),
        (lambda x: x + torch.empty(4), "nothing|no recorded operation"),
        (lambda x: x * x.tolist()[0], "into Python"),
        (lambda x: x * float(x.numpy()[0]), "into Python"),
        (lambda x: torch.view_as_complex(x.view(2, 2)).conj() * 2, "conjugated"),
    ],
)
def test_what_no_later_run_could_repeat_is_refused(compute: Callable[[Tensor], Any], reason: str) -> None:
    x = torch.randn(4)
    with pytest.raises(ValueError, match=reason):
        record(lambda: compute(x), [x])


def test_memory_that_outlives_the_step_is_not_changed() -> None:
    x, count = torch.randn(4), torch.zeros(1)
    with pytest.raises(ValueError, match="outlives the step"):
        record(lambda: x + count.add_(1), [x])
    assert count == 0


def test_what_is_stored_outside_is_stored_in_every_run() -> None:
    x, held = torch.randn(4), torch.zeros(4)
    assert names(lambda: x + held.copy_(torch.ones(4)), x) == ["copy_", "add"]


def test_attention_without_dropout_draws_nothing() -> None:
    q = torch.randn(1, 2, 3, 8)
    assert names(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), q)


def test_values_of_constants_may_decide() -> None:
    x, limit = torch.randn(4), torch.tensor(1.0)
    assert names(lambda: x + 1 if limit > 0 else x - 1, x) == ["add"]


def test_calls_of_kernels_are_operations() -> None:
    def bind(reads: tuple[Tensor | None, ...], out: Tensor) -> HostCall:
        raise AssertionError("nothing is called again here")

    def compute() -> Tensor:
        out = torch.empty_like(x)
        announce(bind, (x, None), out)
        return out + 1

    x = torch.randn(4)
    found = record(compute, [x]).operations
    assert [operation.call is not None for operation in found] == [True, False]
    assert found[0].reads == (x,)
