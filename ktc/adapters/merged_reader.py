"""Rows of a checkpoint's tensors with an adapter added to them.

In: the addition to each stored tensor, the factors, and a reader of the original's rows. Out: the rows of
`W + s B A`, summed in fp32 (fp64 for stored fp64) and rounded once to the stored dtype. Memory has the factors of a few
weights, for any size of model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktc.adapters.factors import FactorReader, Factors, Placed, Whole, halves
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.reader import TORCH_DTYPE, RowReader

_MOST_WEIGHTS = 3  # whose factors are in memory, because the tensors of experts alternate


@dataclass(frozen=True, slots=True)
class Addition:
    """The change of one stored tensor: by factors of `placed`, of one `expert` or all, and of `part` of their rows.

    A tensor that was trained as a whole replaces the stored one.
    """

    entry: TensorEntry
    placed: Placed | Whole
    expert: int | None
    part: str


class MergedReader:
    """Reads rows as a `RowReader`. `added` is the sum of squares of all that was added so far."""

    def __init__(self, additions: Mapping[str, Addition], factors: FactorReader, reader: RowReader) -> None:
        self._additions, self._factors, self._reader = additions, factors, reader
        self._kept: dict[str, Factors] = {}
        self.added = 0.0

    def read(self, entry: TensorEntry, rows: slice | None = None) -> Tensor:
        """Return the tensor with its addition, or the `rows` of its first dimension, in the stored dtype.

        A stack (experts, rows, columns) may be read as a matrix of all its rows (`as_rows`).
        """
        stored = self._reader.read(entry, rows)
        addition = self._additions.get(entry.name)
        if addition is None or not stored.numel():
            return stored
        first, stop, _ = (rows or slice(None)).indices(entry.shape[0])
        if isinstance(addition.placed, Whole):
            trained = self._trained(addition, addition.placed, entry, first, stop)
            self.added += float((trained.float() - stored.float()).square().sum())
            return trained.to(TORCH_DTYPE[entry.dtype]).contiguous()
        per_row = entry.shape[1] if len(entry.shape) == 3 else 1
        delta = self._delta(addition, first * per_row, stop * per_row)
        self.added += float(delta.square().sum())
        summed = stored.to(torch.float64 if entry.dtype == "f64" else torch.float32).add_(delta.view(stored.shape))
        return summed.to(TORCH_DTYPE[entry.dtype]).contiguous()

    def _trained(self, addition: Addition, whole: Whole, entry: TensorEntry, first: int, stop: int) -> Tensor:
        """Return the rows `first` to `stop` of a tensor that was trained as a whole, as `entry` stores them."""
        shape = addition.entry.shape
        if len(entry.shape) == len(shape):
            return self._factors.read_whole(whole, addition.expert, addition.part, slice(first, stop))
        if len(shape) == 1:  # read as one row
            return self._factors.read_whole(whole, None, "", slice(None))[None]
        per_matrix = shape[-2]
        number, begin = divmod(first, per_matrix)
        assert stop - number * per_matrix <= per_matrix, "a band of rows is in one matrix of a stack"
        matrix = self._factors.read_whole(whole, None, "", slice(number, number + 1))[0]
        return matrix[begin : begin + stop - first]

    def _delta(self, addition: Addition, first: int, stop: int) -> Tensor:
        """Return the addition to the rows `first` to `stop` of a matrix, or of all matrices of a stack."""
        assert isinstance(addition.placed, Placed), "whole tensors are read"
        factors = self._of(addition.placed)
        if len(addition.entry.shape) == 2:
            return _part(factors, addition).delta(addition.expert, slice(first, stop))
        per_expert = addition.entry.shape[1]
        parts = [
            _stack_rows(factors, expert, slice(max(first - begin, 0), min(stop - begin, per_expert)))
            for expert in range(first // per_expert, -(-stop // per_expert))
            for begin in (expert * per_expert,)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of(self, placed: Placed) -> Factors:
        name = placed.name
        if name not in self._kept:
            while len(self._kept) >= _MOST_WEIGHTS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[name] = self._factors.read(placed)
        return self._kept[name]


def as_rows(entry: TensorEntry) -> TensorEntry:
    """Return the entry of the same bytes as one matrix of all rows."""
    return replace(entry, shape=(math.prod(entry.shape[:-1]), entry.shape[-1]))


def _part(factors: Factors, addition: Addition) -> Factors:
    if not addition.part:
        return factors
    gate, up = halves(factors)
    return Factors(factors.target, factors.a, gate if addition.part == "gate" else up, factors.scaling)


def _stack_rows(factors: Factors, expert: int, run: slice) -> Tensor:
    """Return rows of the addition to one expert, as the stack stores them."""
    if not factors.target.transposed:
        return factors.delta(expert, run)
    a, b = factors.a[expert].float(), factors.b[expert].float()
    return (b @ a[:, run]).t() * factors.scaling
