"""A checkpoint read as if it were of full precision: names and shapes of the weights themselves, and their rows.

In: the index of safetensors and `quantization_config`. Out: an index whose entries are weights, and a reader of them.
Weights that are stored as codes are restored in bands of rows and rounded to bf16 once, as they are loaded.
Refused (I117): codes that contradict the config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ktc.diagnostics import InputRefused
from ktc.model.checkpoint.header import ITEM_SIZE, TensorEntry
from ktc.model.checkpoint.index import CheckpointIndex
from ktc.model.checkpoint.quantised import StoredWeight, stored_weights
from ktc.model.checkpoint.reader import TORCH_DTYPE, TensorReader
from ktc.model.checkpoint.values import read_rows

RESTORED = "bf16"
"""The dtype of weights that are stored as codes."""


class FullPrecision:
    """`index` has an entry for each weight, whose bytes begin at those of its codes and number those of its values."""

    def __init__(self, stored: CheckpointIndex, config: Mapping[str, Any] | None) -> None:
        """Read the headers. Raises InputRefused (I117)."""
        weights, problems = stored_weights(stored.tensors, config)
        if problems:
            raise InputRefused(*problems[:10])
        self._stored = stored
        self.coded: Mapping[str, StoredWeight] = {
            weight.name: weight for weight in weights if weight.quantised is not None
        }
        self.index = replace(stored, tensors={weight.name: _entry(weight) for weight in weights})

    def reader(self, stored: TensorReader) -> FullPrecisionReader:
        """Return a reader of `index`'s entries over one of the stored tensors."""
        return FullPrecisionReader(self._stored, self.coded, stored)


class FullPrecisionReader:
    """A `RowReader` of the weights themselves."""

    def __init__(self, index: CheckpointIndex, coded: Mapping[str, StoredWeight], stored: TensorReader) -> None:
        self._index, self._coded, self._stored = index, coded, stored

    def read(self, entry: TensorEntry, rows: slice | None = None) -> Tensor:
        """Return the tensor, or the `rows` of its first dimension (no step), in the dtype of `entry`."""
        weight = self._coded.get(entry.name)
        if weight is None or weight.quantised is None:
            return self._stored.read(entry, rows)
        first, stop, _ = (rows or slice(None)).indices(entry.shape[0])
        per_row = math.prod(entry.shape[1:-1])
        run = slice(first * per_row, stop * per_row)
        dtype = TORCH_DTYPE[entry.dtype]
        weights = read_rows(self._stored, self._index, weight.entry, weight.quantised, run, dtype)
        return weights.view(stop - first, *entry.shape[1:])


def _entry(weight: StoredWeight) -> TensorEntry:
    stored = weight.entry
    if weight.quantised is None:
        return stored
    size = math.prod(weight.shape) * ITEM_SIZE[RESTORED]
    return TensorEntry(weight.name, stored.file, RESTORED, weight.shape, stored.begin, stored.begin + size)
