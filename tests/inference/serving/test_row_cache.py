"""Rows join and leave a cache, and every row keeps its tokens wherever they lie in memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ktc.inference.serving.contiguous_kv import ContiguousKV
from ktc.inference.serving.pages import LayerRow
from ktc.inference.serving.row_cache import CachedRow, RowCache

WINDOW = 6


class Rows:
    """A cache beside the same rows as plain tensors: one layer of all tokens, a window, and a layer without content."""

    def __init__(self, room: int) -> None:
        self.cache, self.rows, self._count = RowCache(room=room), list[Tensor](), 0

    def tokens(self, num: int) -> Tensor:
        self._count += num
        return torch.arange(self._count - num, self._count, dtype=torch.float32)[None, :, None].expand(2, -1, 3) + 1

    def join(self, length: int) -> None:
        row = self.tokens(length)
        layers = (LayerRow(row, -row), LayerRow(row[:, -WINDOW + 1 :], -row[:, -WINDOW + 1 :]), None)
        self.cache.join(CachedRow(length, layers, (None, WINDOW, None)))
        self.rows.append(row)

    def leave(self, at: int) -> None:
        self.cache.leave(at)
        self.rows[at] = self.rows[-1]
        self.rows.pop()

    def step(self) -> None:
        new = torch.stack([self.tokens(1) for _ in self.rows])
        self.rows = [torch.cat(pair, dim=1) for pair in zip(self.rows, new, strict=True)]
        columns = self.cache.columns
        for index, seen in ((0, columns + 1), (1, min(columns, WINDOW - 1) + 1)):
            assert self.cache.cache.get_mask_sizes(1, index) == (seen, columns + 1 - seen)
            keys, values = self.cache.cache.update(new, -new, index)
            assert keys.shape == (len(self.rows), 2, seen, 3)
            assert torch.equal(keys, -values) and bool(keys.isfinite().all())
            for found, row in zip(keys, self.rows, strict=True):
                kept = min(seen, row.shape[1])
                assert torch.equal(found[:, seen - kept :], row[:, -kept:])
        self.cache.appended()


@pytest.mark.parametrize("room", [1, 3, 64])
def test_rows_keep_their_tokens_through_joins_steps_and_leaves(room: int) -> None:
    chance, rows = random.Random(room), Rows(room)
    for _ in range(120):
        if len(rows.rows) < 2 or (len(rows.rows) < 7 and chance.random() < 0.3):
            rows.join(chance.choice((1, 3, WINDOW, 9, 20)))
        if len(rows.rows) > 1 and chance.random() < 0.25:
            rows.leave(chance.randrange(len(rows.rows)))
        rows.step()
        at = chance.randrange(len(rows.rows))
        whole, window, nothing = rows.cache.row(at).layers
        assert whole is not None and window is not None and nothing is None
        assert torch.equal(whole.keys, rows.rows[at]) and torch.equal(whole.values, -rows.rows[at])
        assert torch.equal(window.keys, rows.rows[at][:, -WINDOW + 1 :])


def test_an_empty_cache_holds_no_memory() -> None:
    rows = Rows(4)
    rows.join(5)
    rows.step()
    assert rows.cache.nbytes > 0
    rows.leave(0)
    assert (rows.cache.nbytes, rows.cache.columns) == (0, 0)
    rows.join(2)
    rows.step()


def test_rows_of_growing_lengths_seldom_move_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that come in the order of their lengths would copy all rows at every join."""
    moved, relocate = list[int](), ContiguousKV._relocate

    def counted(band: ContiguousKV, slots: int, width: int) -> None:
        moved.append(slots)
        relocate(band, slots, width)

    monkeypatch.setattr(ContiguousKV, "_relocate", counted)
    band, lengths = ContiguousKV(torch.zeros(2, 1, 3), 256), range(20, 148, 2)
    for length in lengths:
        band.join(torch.full((2, length, 3), float(length)))
    for at, length in enumerate(lengths):
        assert torch.equal(band.row(at, length), torch.full((2, length, 3), float(length)))
    assert bool(band.view().isfinite().all())
    growths = len(set(moved))
    assert len(moved) <= growths + 2, "few of them because a row was longer"
