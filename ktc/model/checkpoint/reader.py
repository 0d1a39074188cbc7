"""Read values of a checkpoint's tensors into memory, one tensor or one range of its rows at a time.

Positioned reads are used instead of a memory map: only requested data is resident, and a shard that was truncated after
its header was read is an error with a name instead of a bus error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.anonymous_memory import take_huge_pages
from ktc.foundation.regular_files import open_descriptor
from ktc.model.checkpoint.header import TensorEntry

TORCH_DTYPE: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_BAND = 1 << 22  # weights that are in memory at once
_LARGEST_READ = 1 << 30  # Linux moves at most 2 GiB in one call


class RowReader(Protocol):
    """A reader of rows of a checkpoint's tensors: as stored, dequantised, or with an adapter added."""

    def read(self, entry: TensorEntry, rows: slice | None = None) -> Tensor:
        """Return the tensor, or the `rows` of its first dimension (no step), in the dtype of `entry`."""
        ...


def bands(rows: int, columns: int, weights: int = 0) -> list[slice]:
    """Return runs of rows that have at most `weights` weights each (0: `_BAND`), and at least a row."""
    band = max(1, (weights or _BAND) // max(1, columns))
    return [slice(first, min(first + band, rows)) for first in range(0, rows, band)]


class TensorReader:
    """Read tensors of one checkpoint folder; holds one file open. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = ""
        self._descriptor = -1

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, entry: TensorEntry, rows: slice | None = None) -> Tensor:
        """Return the tensor, or the `rows` of its first dimension (no step), in its own dtype on the CPU.

        Raises `InputRefused` if the file is truncated or unreadable.
        """
        first, count = 0, entry.shape[0] if entry.shape else 1
        if rows is not None:
            first, stop, _ = rows.indices(count)
            count = stop - first
        shape = (count, *entry.shape[1:]) if entry.shape else ()
        out = torch.empty(shape, dtype=TORCH_DTYPE[entry.dtype])
        take_huge_pages(out.data_ptr(), out.nbytes)
        row_bytes = (entry.end - entry.begin) // max(1, entry.shape[0] if entry.shape else 1)
        self._read_into(out, entry, entry.begin + first * row_bytes)
        return out

    def _read_into(self, out: Tensor, entry: TensorEntry, position: int) -> None:
        if out.numel() == 0:
            return
        view = memoryview(out.reshape(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._open(entry.file), [view[done : done + _LARGEST_READ]], position + done)
            except OSError as error:
                raise InputRefused(_unreadable(entry, str(error.strerror))) from error
            if count == 0:
                raise InputRefused(_unreadable(entry, "the file was truncated"))
            done += count

    def _open(self, file: str) -> int:
        if file != self._file:
            self._close()
            self._descriptor = open_descriptor(self._folder / file)
            self._file = file
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._file, self._descriptor = "", -1


def _unreadable(entry: TensorEntry, why: str) -> Diagnostic:
    return Diagnostic(
        "I112",
        f"tensor `{entry.name}` cannot be read from `{entry.file}`: {why}",
        hint=f"download or copy `{entry.file}` again",
    )
