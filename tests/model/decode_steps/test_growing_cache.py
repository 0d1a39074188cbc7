"""A cache that grows in place holds what `DynamicCache` holds, after everything that `generate` does with caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from ktc.model.decode_steps.growing_cache import GrowingLayer, growing


def caches() -> tuple[DynamicCache, DynamicCache]:
    """A stock cache of one layer and one that grows, with the same seven tokens of two sequences."""
    stock, ours = DynamicCache(), DynamicCache()
    first = states(7, seed=1)
    for cache in (stock, ours):
        cache.update(*first, 0)
    ours = growing(ours)
    assert isinstance(ours.layers[0], GrowingLayer)
    return stock, ours


def states(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 3, tokens, 4, generator=generator) for _ in range(2))
    return keys, values


def equal(stock: DynamicCache, ours: DynamicCache) -> bool:
    a, b = stock.layers[0], ours.layers[0]
    return torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


CHANGES: dict[str, tuple[Callable[[Any], object], int]] = {
    "nothing": (lambda cache: None, 2),
    "crop": (lambda cache: cache.crop(-3), 2),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), 2),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), 4),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), 1),
    "reset": (lambda cache: cache.reset(), 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_holds_what_a_stock_cache_holds(name: str) -> None:
    change, batch = CHANGES[name]
    stock, ours = caches()
    for cache in (stock, ours):
        for step in range(3):
            cache.update(*states(1, seed=step), 0)
        change(cache)
    for step in range(130):  # beyond the room twice
        new = states(1 + step % 2, batch, seed=10 + step)
        returned = [cache.update(*new, 0) for cache in (stock, ours)]
        assert all(torch.equal(a, b) for a, b in zip(*returned, strict=True))
    assert equal(stock, ours) and stock.get_seq_length() == ours.get_seq_length()


def test_a_step_copies_one_token_and_not_all() -> None:
    _, ours = caches()
    ours.update(*states(1), 0)
    before = ours.layers[0].keys.data_ptr()
    for step in range(40):
        ours.update(*states(1, seed=step), 0)
    assert ours.layers[0].keys.data_ptr() == before


def test_a_copy_grows_apart() -> None:
    stock, ours = caches()
    ours.update(*states(1), 0)
    stock.update(*states(1), 0)
    other = copy.deepcopy(ours)
    other.update(*states(1, seed=5), 0)
    ours.update(*states(1, seed=6), 0)
    stock.update(*states(1, seed=6), 0)
    assert equal(stock, ours) and not equal(stock, other)


def test_gradients_flow_as_through_a_stock_cache() -> None:
    _, ours = caches()
    keys, values = (each.requires_grad_() for each in states(1))
    ours.update(keys, values, 0)[0].sum().backward()
    assert keys.grad is not None
