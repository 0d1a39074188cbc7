"""Scores that query heads share: the order and the weight of the sum of their softmax."""

from __future__ import annotations

import pytest
import torch
from long_contexts import long_context

from ktc.model.attention.key_codes import encode, estimates, mean_of
from ktc.model.attention.shared_scores import shared

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, WIDTH, GROUP, K = 8192, 128, 4, 512


@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
def test_the_best_positions_hold_the_weight_of_those_by_softmax(rope: bool) -> None:
    context = long_context("mass", rope, positions=LENGTH, width=WIDTH, queries=48)
    keys, queries = context.keys[None, None], context.queries.view(1, 12, GROUP, WIDTH).transpose(1, 2)
    codes = encode(keys, mean_of(keys), "int4")
    scores = estimates(queries, codes, "int4", LENGTH, context.scale)[:, None]  # twelve tokens of four heads
    by_softmax = scores.softmax(-1).sum(2)
    by_bits = shared(scores, torch.ones(1, 12, LENGTH, dtype=torch.bool))
    weights = context.weights.view(12, GROUP, LENGTH)
    best, found = (
        float(weights.gather(-1, each[0, 0].topk(K).indices[:, None].expand(-1, GROUP, -1)).sum(-1).mean())
        for each in (by_softmax, by_bits)
    )
    assert best > 0.7
    assert abs(found - best) < 1e-3


def test_the_order_of_one_head_is_that_of_its_scores() -> None:
    scores = torch.randn(1, 1, 1, 1, 500, generator=torch.Generator().manual_seed(0)).sort(-1).values
    found = shared(scores, torch.ones(1, 1, 500, dtype=torch.bool)).flatten()
    assert bool((found[1:] >= found[:-1]).all())
    assert float(found.sum()) == pytest.approx(1, abs=0.01)
    assert bool((found[8:] > found[:-8]).all()), "only neighbours are equal in bf16"


def test_hidden_positions_have_no_part_and_an_invalid_score_is_the_greatest() -> None:
    scores = torch.zeros(1, 1, 2, 1, 100)
    scores[..., 40:] = 50.0  # hidden
    scores[0, 0, 1, 0, 7] = torch.nan
    visible = torch.ones(1, 1, 100, dtype=torch.bool)
    visible[..., 40:] = False
    found = shared(scores, visible)[0, 0, 0, :40]
    assert int(found.argmax()) == 7
    assert float(found[8]) == pytest.approx(1 / 40, rel=0.01), "the other head sees 40 equal positions"
    assert not shared(scores, torch.zeros_like(visible)).isnan().any()
