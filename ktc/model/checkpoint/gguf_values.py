"""Values of GGUF's block types: weights of a tensor or of one expert, dequantised in bands of rows, or the raw blocks.

The `gguf` package defines the blocks. It computes in fp32, and the result is rounded once. The input has been checked:
whole blocks of a known type.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.anonymous_memory import take_huge_pages
from ktc.foundation.formats import BLOCKS, STORED
from ktc.model.checkpoint.block_scales import suspects
from ktc.model.checkpoint.gguf_types import BLOCK_TYPES
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.reader import TensorReader, bands

_BAND: Final = 1 << 20  # weights dequantised per step: some types use forty bytes of temporary memory for each


def read_dequantised(reader: TensorReader, entry: TensorEntry, expert: int | None, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor, or the matrix of one expert of a stack, rounded to `dtype`. Threads dequantise bands."""
    shape = entry.shape if expert is None else entry.shape[1:]
    out = torch.empty(shape, dtype=dtype)
    take_huge_pages(out.data_ptr(), out.nbytes)
    rows = out.view(-1, shape[-1])
    done = 0
    # PyTorch rounds on its own threads here; on each of the others it would open as many.
    for values in _dequantised(_bands(reader, entry, expert), entry.dtype):
        rows[done : done + len(values)] = values
        done += len(values)
    return out


def _dequantised(bands_of_blocks: Iterator[Tensor], type_name: str) -> Iterator[Tensor]:
    """Yield fp32 weights of each band, in their order. NumPy computes them on threads while the next ones are read."""
    threads = host.usable_threads()
    waiting = deque[Future[Tensor]]()
    with ThreadPoolExecutor(threads, "ktc-dequantising") as pool:
        for blocks in bands_of_blocks:
            waiting.append(pool.submit(dequantised, blocks, type_name))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def read_blocks(reader: TensorReader, entry: TensorEntry, expert: int | None) -> Tensor:
    """Return the bytes of the whole tensor or of one expert's matrix: (rows, bytes of a row)."""
    whole = _as_bytes(entry)
    return reader.read(whole, _rows_of(entry, whole, expert))


def dequantised(blocks: Tensor, type_name: str) -> Tensor:
    """Return fp32 weights (rows, columns) of uint8 blocks (rows, bytes of a row)."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # NaN scales yield NaN weights, which the loader reports
        values = cast("Callable[..., Any]", dequantize)(blocks.numpy(), GGMLQuantizationType(STORED[type_name].gguf))
    return torch.from_numpy(values)


def mxfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Convert to GGUF's blocks: codes (rows, 16 per block) with the earlier weight low, and exponents per block.

    A GGUF block begins with its exponent, and a byte holds the weights j and j + 16.
    """
    rows, groups = scales.shape
    pairs = codes.view(rows, groups, 16)
    in_order = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).view(rows, groups, 32)
    together = in_order[..., :16] | in_order[..., 16:] << 4
    return torch.cat((scales.view(rows, groups, 1), together), dim=-1).view(rows, -1)


def are_finite(blocks: Tensor, type_name: str) -> bool:
    """Return whether no weight is infinite or NaN, determined from the scales of the types that kernels multiply."""
    row = BLOCKS.get(type_name)
    split = blocks.view(-1, row.block_bytes if row else BLOCK_TYPES[type_name].bytes)
    doubtful = split if row is None else suspects(split, row)
    if doubtful is None:
        return False
    return not len(doubtful) or bool(dequantised(doubtful, type_name).isfinite().all())


def _bands(reader: TensorReader, entry: TensorEntry, expert: int | None) -> Iterator[Tensor]:
    whole = _as_bytes(entry)
    rows = _rows_of(entry, whole, expert)
    for band in bands(rows.stop - rows.start, entry.shape[-1], _BAND):
        yield reader.read(whole, slice(rows.start + band.start, rows.start + band.stop))


def _as_bytes(entry: TensorEntry) -> TensorEntry:
    rows = math.prod(entry.shape[:-1])
    return replace(entry, dtype="u8", shape=(rows, (entry.end - entry.begin) // rows))


def _rows_of(entry: TensorEntry, whole: TensorEntry, expert: int | None) -> slice:
    if expert is None:
        return slice(0, whole.shape[0])
    rows = whole.shape[0] // entry.shape[0]
    return slice(expert * rows, (expert + 1) * rows)
