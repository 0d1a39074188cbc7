"""Rows of tokens while they are made: kept in memory, or in an Arrow file for data that the memory does not hold.

In: rows one by one. Out: a dataset of TRL's tokenised form, whose rows stay in the file where there is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, cast

from ktc.foundation.files import temporary_folder
from ktc.training.tune.labels import Labelled

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH: Final = 1000  # rows that are written together


class TokenFile:
    """An Arrow file of `input_ids` and `labels` in the folder for temporary files; it goes with this object."""

    def __init__(self) -> None:
        import pyarrow

        arrow: Any = pyarrow
        opened = ExitStack()
        weakref.finalize(self, opened.close)  # also at the end of the process
        self._path = opened.enter_context(temporary_folder("tokens")) / "tokens.arrow"
        numbers = arrow.list_(arrow.int32())
        self._schema = arrow.schema([("input_ids", numbers), ("labels", numbers)])
        self._file = opened.enter_context(self._path.open("wb"))
        self._writer: Any = arrow.ipc.new_stream(self._file, self._schema)
        self._waiting: list[Labelled] = []

    def add(self, row: Labelled) -> None:
        """Write a row, together with some that follow."""
        self._waiting.append(row)
        if len(self._waiting) == _BATCH:
            self._write()

    def dataset(self, order: Sequence[int]) -> Dataset:
        """Return the rows of these numbers; no row can be added afterwards."""
        from datasets import Dataset

        if not self._file.closed:
            self._write()
            self._writer.close()
            self._file.close()
        rows = Dataset.from_file(str(self._path))
        is_whole = isinstance(order, range) and len(order) == len(rows)
        return rows if is_whole else cast("Any", rows).select(order)

    def _write(self) -> None:
        import pyarrow

        columns = {"input_ids": [row.ids for row in self._waiting], "labels": [row.labels for row in self._waiting]}
        self._writer.write_table(cast("Any", pyarrow).table(columns, schema=self._schema))
        self._waiting = []
