"""The memory of running batches at fixed addresses: rows keep their tokens, whoever joins, leaves or has no memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ktc.inference.serving import row_memory
from ktc.inference.serving.pages import LayerRow
from ktc.inference.serving.row_cache import CachedRow
from ktc.inference.serving.row_memory import STANDING, RowMemory, standing_bytes, unfit_row

WINDOW = 6


def failing(*_: object) -> object:
    raise ValueError("no luck")


class Rows:
    """A memory beside the same rows as plain tensors: one layer of all tokens, and a window."""

    def __init__(self, most: int = 1) -> None:
        self.memory, self.rows, self._count = RowMemory(most), list[Tensor](), 0

    def tokens(self, num: int) -> Tensor:
        self._count += num
        return torch.arange(self._count - num, self._count, dtype=torch.float32)[None, :, None].expand(2, -1, 3) + 1

    def join(self, length: int) -> None:
        row = self.tokens(length)
        layers = (LayerRow(row, -row), LayerRow(row[:, -WINDOW + 1 :], -row[:, -WINDOW + 1 :]))
        self.memory.join(CachedRow(length, layers, (None, WINDOW)))
        self.rows.append(row)

    def leave(self, at: int) -> None:
        self.memory.leave(at)
        self.rows[at] = self.rows[-1]
        self.rows.pop()

    def step(self) -> None:
        new = torch.stack([self.tokens(1) for _ in self.rows])
        self.rows = [torch.cat(pair, dim=1) for pair in zip(self.rows, new, strict=True)]
        slots = self.memory.begin_step()
        places = self.memory.places(slots)
        assert slots >= len(self.rows) and slots & (slots - 1) == 0
        given = torch.cat([new, new[:1].expand(slots - len(new), -1, -1, -1)])
        end = int(places.position) + 1
        for index, layer in enumerate((0, 1)):
            keys, values = places.cache.update(given, -given, layer)
            assert keys.shape == (slots, 2, self.memory.capacity, 3)
            assert torch.equal(keys, -values)
            for at in range(slots):
                row = self.rows[at] if at < len(self.rows) else self.rows[0]
                length = row.shape[1] if index == 0 else min(row.shape[1], WINDOW - 1)
                assert torch.equal(keys[at, :, end - length : end], row[:, -length:])
                assert int(places.present[at, :end].sum()) == row.shape[1]
                assert bool(places.present[at, end - row.shape[1] :].all())
        self.memory.appended()

    def check(self, at: int) -> None:
        whole, window = self.memory.row(at).layers
        assert whole is not None and window is not None
        assert torch.equal(whole.keys, self.rows[at]) and torch.equal(whole.values, -self.rows[at])
        assert torch.equal(window.keys, self.rows[at][:, -WINDOW + 1 :])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacities of 16 positions and more, no memory for rows to come, and moves with one column left."""
    monkeypatch.setattr(row_memory, "capacity_for", lambda positions: -(-positions // 16) * 16)
    monkeypatch.setattr(row_memory, "ROOM", 2)
    monkeypatch.setattr(row_memory, "STANDING", 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(3))
def test_rows_keep_their_tokens_through_joins_steps_and_leaves(seed: int) -> None:
    chance, rows = random.Random(seed), Rows()
    for _ in range(150):
        if len(rows.rows) < 2 or (len(rows.rows) < 7 and chance.random() < 0.3):
            rows.join(chance.choice((1, 3, WINDOW, 9, 20, 40)))
        if len(rows.rows) > 1 and chance.random() < 0.3:
            rows.leave(chance.randrange(len(rows.rows)))
        if chance.random() < 0.03:
            rows.memory.compact()
        rows.step()
        rows.check(chance.randrange(len(rows.rows)))


def test_addresses_change_only_where_rows_outgrow_them() -> None:
    rows = Rows(most=8)
    rows.join(20)
    versions = list[int]()
    for turn in range(300):
        if turn % 7 == 3 and len(rows.rows) < 8:
            rows.join(30)
        if turn % 11 == 9 and len(rows.rows) > 1:
            rows.leave(turn % len(rows.rows))
        rows.step()
        versions.append(rows.memory.version)
    assert len(set(versions)) <= 3


def test_a_memory_has_slots_for_all_rows_and_then_positions_for_long_ones_within_its_bytes() -> None:
    token = 2 * 2 * 2 * 3 * 4  # bytes: two layers, keys and values, heads, widths, fp32
    sizes = list[tuple[int, int]]()
    for standing in (0, 4 * 256 * token, 8 * 256 * token, 8 * 512 * token, 1 << 40):
        memory = RowMemory(8, standing)
        row = LayerRow(*[torch.zeros(2, 9, 3)] * 2)
        memory.join(CachedRow(9, (row, row), (None, None)))
        sizes.append((memory.slots, memory.capacity))
    assert sizes == [(1, 256), (4, 256), (8, 256), (8, 512), (8, 1024)]
    assert standing_bytes(None) == STANDING == standing_bytes(16 * STANDING)
    assert standing_bytes(1 << 20) == 1 << 20 and STANDING < standing_bytes(1 << 40) <= 1 << 31


def test_memory_for_rows_to_come_that_is_missing_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = row_memory.zeros_on_huge_pages

    def scarce(shape: tuple[int, ...], like: Tensor) -> Tensor:
        if shape[0] * shape[2] > 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return zeros(shape, like)

    monkeypatch.setattr(row_memory, "zeros_on_huge_pages", scarce)
    rows = Rows(most=8)
    rows.join(9)
    rows.step()
    rows.check(0)
    assert (rows.memory.slots, rows.memory.capacity) == (1, 256)


def test_a_join_without_memory_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    rows.join(20)
    rows.step()
    monkeypatch.setattr(row_memory, "zeros_on_huge_pages", failing)
    with pytest.raises(ValueError, match="no luck"):
        rows.memory.join(CachedRow(2000, (LayerRow(*[torch.zeros(2, 2000, 3)] * 2),) * 2, (None, WINDOW)))
    rows.step()
    rows.check(0)


def test_a_row_with_numbers_that_are_none_does_not_spoil_those_after_it() -> None:
    memory, row = RowMemory(), torch.full((1, 200, 2), float("nan"))
    memory.join(CachedRow(200, (LayerRow(row, row),), (None,)))
    memory.begin_step()
    memory.leave(0)
    memory.join(CachedRow(3, (LayerRow(row[:, :3] * 0 + 1, torch.ones(1, 3, 2)),), (None,)))
    memory.leave(0)
    ones = torch.ones(1, 3, 2)
    memory.join(CachedRow(3, (LayerRow(ones, ones),), (None,)))
    memory.begin_step()
    assert all(bool(tensor.isfinite().all()) for tensor in memory.places(1).tensors)


def test_layers_without_keys_of_their_own_are_refused() -> None:
    row = LayerRow(*[torch.zeros(1, 3, 2)] * 2)
    assert "layer 1" in unfit_row(CachedRow(3, (row, None), (None, None)))
    assert not unfit_row(CachedRow(3, (row, row), (None, None)))
