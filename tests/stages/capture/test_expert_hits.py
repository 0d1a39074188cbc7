"""A loop over experts may ask data which experts have tokens; any other branch on data is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ktc.stages.capture.expert_hits import DependsOnData
from ktc.stages.capture.unrolled import every_expert

EXPERTS, TOKENS, CHOSEN = 6, 21, 2
Asked = Callable[[Tensor, Tensor], object]


def answer(asked: Asked) -> object:
    scores = torch.empty(TOKENS, EXPERTS, device="meta")
    with every_expert(EXPERTS, 0):
        return asked(scores, scores.topk(CHOSEN, -1).indices)


def mask(chosen: Tensor) -> Tensor:
    return functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)


def spread(scores: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen).softmax(-1))


def counts(chosen: Tensor) -> Tensor:
    return chosen.new_zeros(TOKENS, EXPERTS).scatter_(1, chosen, 1).sum(0)


WHETHER_HIT: dict[str, tuple[Asked, bool]] = {
    "any": (lambda s, c: bool((c == 3).any()), True),
    "not any": (lambda s, c: not (c == 3).any(), False),
    "sum is zero": (lambda s, c: bool(mask(c)[5].sum() == 0), False),
    "sum above zero": (lambda s, c: bool(mask(c)[0].sum() > 0), True),
    "at least one": (lambda s, c: bool((c == 2).sum() >= 1), True),
    "a count": (lambda s, c: bool(torch.bincount(c.flatten(), minlength=EXPERTS)[4]), True),
    "a spread weight": (lambda s, c: bool((spread(s, c)[:, 1] > 0).any()), True),
    "written in place": (lambda s, c: bool(counts(c)[2] == 0), False),
}


@pytest.mark.parametrize("name", WHETHER_HIT)
def test_whether_an_expert_has_tokens_is_answered_as_if_it_had(name: str) -> None:
    asked, expected = WHETHER_HIT[name]
    assert answer(asked) is expected


@pytest.mark.parametrize(
    "asked",
    [
        lambda s, c: list(torch.greater(mask(c).sum((-1, -2)), 0).nonzero()),
        lambda s, c: list(c.unique()),
        lambda s, c: list(torch.bincount(c.flatten(), minlength=EXPERTS).nonzero()),
    ],
)
def test_the_experts_with_tokens_are_all(asked: Asked) -> None:
    assert answer(asked) == list(range(EXPERTS))


def over(scores: Tensor, chosen: Tensor) -> bool:
    view = (found := counts(chosen))[1:3]
    view.add_(scores.sum().long())
    return bool(found[2])


def longest(scores: Tensor, chosen: Tensor) -> bool:
    return any(tokens > 4096 for tokens in counts(chosen).tolist())


@pytest.mark.parametrize(
    "asked",
    [
        lambda s, c: bool((s > 3).any()),
        lambda s, c: bool((s < 3).all()),
        lambda s, c: bool((c == 3).any() & (s < 3).all()),
        lambda s, c: bool(torch.isfinite(s).all()),
        lambda s, c: bool((c == 3).all()),
        lambda s, c: bool((c == 3).sum() < 4096),
        lambda s, c: bool((c == 3).sum() > 1),
        lambda s, c: bool((c[:, 0] == 3).any()),
        lambda s, c: bool((c >= 3).any()),
        lambda s, c: bool((c == 3).float().mean() * 4096 > 4096 * 0.5),
        lambda s, c: list((mask(c).sum((-1, -2)) < 4096).nonzero()),
        lambda s, c: list(c[:, 0].unique()),
        lambda s, c: counts(c[:, :1]).mul(2).tolist(),
        lambda s, c: bool(torch.where(c == 3)[0].any()),
        over,
        longest,
    ],
)
def test_any_other_branch_on_data_is_refused(asked: Asked) -> None:
    with pytest.raises(DependsOnData):
        answer(asked)
