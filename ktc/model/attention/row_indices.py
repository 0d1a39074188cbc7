"""Indices of a running batch: each row has its own, in the positions of its own sequence.

In: keys of rows that are aligned at their last token, padded on the left. Out: `Chosen` in the columns of the batch. An
index has the mean and the codes that it would have alone, so a row's choice does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ktc.model.attention.decode import Chosen, KVCacheView
from ktc.model.attention.key_index import KeyIndex


@dataclass(slots=True)
class RowIndices:
    """The index of every row; None for a row that no call has indexed yet."""

    rows: list[KeyIndex | None] = field(default_factory=list[KeyIndex | None])

    @property
    def nbytes(self) -> int:
        """The bytes of their tensors."""
        return sum(index.nbytes for index in self.rows if index is not None)

    def join(self) -> None:
        """Add a row after the others."""
        self.rows.append(None)

    def leave(self, at: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows[at] = self.rows[-1]
        self.rows.pop()


def row_lengths(mask: Tensor | None, rows: int, columns: int) -> list[int] | None:
    """Return the tokens of each row under a `mask` (B or 1, 1, 1, L); None where a row does not see its last ones."""
    if mask is None:
        return [columns] * rows
    visible = mask[:, 0, 0, :columns].expand(rows, columns)
    lengths = visible.sum(-1)
    padding = torch.arange(columns, device=mask.device) < columns - lengths[:, None]
    return None if bool((visible & padding).any()) else cast("list[int]", lengths.tolist())


def row_of(kv: KVCacheView, at: int, length: int) -> KVCacheView:
    """Return the last `length` positions of a row, as views with one row."""
    first = kv.keys.shape[2] - length
    keys, rope_keys = kv.keys[at : at + 1, :, first:], kv.rope_keys
    values = keys if kv.values is kv.keys else kv.values[at : at + 1, :, first:]
    return KVCacheView(keys, values, None if rope_keys is None else rope_keys[at : at + 1, :, first:])


def joined(parts: Sequence[Chosen], offsets: Sequence[int]) -> Chosen:
    """Return the choices of rows together, each moved by the columns before its row."""
    counts = torch.cat([part.counts for part in parts])
    _, T, S, _ = parts[0].positions.shape
    positions = counts.new_zeros((len(parts), T, S, max(part.positions.shape[-1] for part in parts)))
    for at, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        positions[at, ..., : part.positions.shape[-1]] = part.positions[0] + offset
    return Chosen(positions, counts)


def every_position(length: int, choosing: int, device: torch.device) -> Chosen:
    """Return the choice of one token of one row that reads all of its positions."""
    positions = torch.arange(length, dtype=torch.int32, device=device).expand(1, 1, choosing, length)
    return Chosen(positions, torch.full((1, 1, choosing), length, dtype=torch.int32, device=device))
