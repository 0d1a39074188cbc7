"""A function that backward computes again has the results and gradients of the function itself."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ktc.training.trainers.recomputed import recomputed


@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize("as_in_backward", [False, True])
def test_results_and_gradients_are_those_of_the_function(as_in_backward: bool, keeps_graph: bool) -> None:
    torch.manual_seed(0)
    linear, calls = nn.Linear(8, 6), list[bool]()

    def function(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(torch.is_grad_enabled())
        out = linear(x).tanh() * factor
        return out, out.argmax(-1), out.exp() if y is None else out * y

    def gradients(y: Tensor | None, *, again: bool) -> list[Tensor]:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        linear.zero_grad()
        arguments: tuple[Any, ...] = (x, y, 3.0)
        ways = {"as_in_backward": as_in_backward, "keeps_graph": keeps_graph}
        results = recomputed(function, *arguments, **ways) if again else function(*arguments)
        (results[0].sum() + (results[2] ** 2).sum()).backward()
        leaves = (x, *linear.parameters(), *([] if y is None else [y]))
        return [*(result.detach() for result in results), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    for y in (None, torch.randn(5, 6).requires_grad_()):
        ours = gradients(y, again=True)
        if y is not None:
            y.grad = None
        for one, other in zip(ours, gradients(y, again=False), strict=True):
            assert torch.equal(one, other)
    assert calls == ([True] * 4 if keeps_graph else [as_in_backward, True, True] * 2)


def test_backward_draws_the_numbers_of_forward_and_no_others() -> None:
    x = torch.ones(50).requires_grad_()
    torch.manual_seed(3)
    out = recomputed(lambda x: nn.functional.dropout(x, 0.5), x, as_in_backward=False)
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    assert 0 < int(x.grad.count_nonzero()) < 50


def test_a_kept_graph_is_freed_by_its_backward() -> None:
    x = torch.randn(4).requires_grad_()
    made: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        inner = x.exp()
        made.append(weakref.ref(inner))
        return inner * inner

    out = recomputed(function, x, as_in_backward=False, keeps_graph=True)
    assert made[0]() is not None
    out.sum().backward(retain_graph=True)
    assert made[0]() is None
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()


def test_a_result_that_nothing_uses_has_no_gradient() -> None:
    x = torch.randn(4).requires_grad_()
    first, _ = recomputed(lambda x: (x * 2, x * 3), x, as_in_backward=False)
    first.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 2.0))


def test_without_gradients_nothing_is_kept() -> None:
    assert not recomputed(lambda x: x * 2, torch.randn(4), as_in_backward=False).requires_grad
