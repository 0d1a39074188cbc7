"""Sizes of the memory that streamed weights pass through, and of the chunks that experts on a GPU are computed in.

The plan counts them as the ring and the stream take them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_BUFFER: Final = 1 << 30  # bytes of a ring: it hides 18 ms of other work on a bus of 55 GB/s
TIGHT_BUFFER: Final = 1 << 28  # of a ring beside experts that stay for decoding, where memory holds a part of them
PIECES: Final = 4  # that a ring holds at least

# Bytes of decoded matrices in a chunk, and of its rows in their widest form: parts of the GPU's memory. A chunk costs
# Python half a millisecond forward and more than one backward, and its products have some eight such arrays of rows.
_LEAST: Final = 128 << 20
_MOST: Final = 1 << 30
_PART_OF_MATRICES, _PART_OF_ROWS = 24, 128
_LEAST_ROWS: Final = 32 << 20  # with a small ring, whose chunks have few experts
_ROWS_OF_BUFFER: Final = 8
_ARRAYS: Final = 8
_SUMS: Final = 12  # bytes per token and unit of width
_CHUNKS: Final = 32  # of a layer at most, where the ring holds such pieces
_PLAIN_CHUNKS: Final = 4  # of plain weights that stay, which take no memory beside their rows


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The most bytes that a chunk has of decoded matrices, and of rows in their widest form."""

    matrices: int
    rows: int


def chunk_bytes(memory: int, buffer: int = DEFAULT_BUFFER) -> ChunkBytes:
    """Return the bytes of a chunk on a device with `memory` free bytes, whose ring has `buffer` bytes.

    A ring that is smaller than usual says that memory is scarce; what is free then has no effect.
    """
    matrices, rows = (min(max(_LEAST, memory // part), _MOST) for part in (_PART_OF_MATRICES, _PART_OF_ROWS))
    if buffer < DEFAULT_BUFFER:
        matrices, rows = min(matrices, max(_LEAST, buffer)), min(rows, max(_LEAST_ROWS, buffer // _ROWS_OF_BUFFER))
    return ChunkBytes(matrices, rows)


def working_bytes(chunk: ChunkBytes, rows: int | None = None) -> int:
    """Return the bytes that the products of a chunk take at most: its matrices, and arrays of its rows.

    `rows` are the bytes of all rows of a call in their widest form, None for any number.
    """
    return chunk.matrices + _ARRAYS * (chunk.rows if rows is None else min(rows, chunk.rows))


def result_bytes(hidden: int, top_k: int, item: int, processes: int = 1) -> int:
    """Return the bytes of a token of a call: a row for each choice, and its input, sums in fp32 and gradients.

    Of several `processes` that share experts, each has inputs and sums of all rows, and its part of the choices.
    """
    return hidden * (_SUMS * processes + top_k * item)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The sizes that decide how a layer's experts are cut.

    `decoded` and `stored` are the bytes of an expert as it is multiplied and as it is kept, `chunk` those of matrices
    that a chunk may have. `buffer` is that of the ring, 0 for weights that stay; `plain` ones need no decoding.
    """

    decoded: int
    stored: int
    chunk: int
    buffer: int
    plain: bool

    def cut(self, share: range) -> tuple[range, ...]:
        """Cut neighbours into runs of about equal length; if up to a third more makes them equal: one compilation."""
        fewest = _PLAIN_CHUNKS if self.plain and not self.buffer else _CHUNKS
        most = max(1, self.chunk // self.decoded, -(-len(share) // fewest))
        limit = max(1, self.buffer // PIECES // self.stored if self.buffer else len(share))
        most = min(most, limit, len(share))
        longest = min(most + most // 3, limit)
        even = [size for size in range(most, longest + 1) if len(share) % size == 0]
        size = even[0] if even else -(-len(share) // -(-len(share) // most))
        return tuple(share[first : first + size] for first in range(0, len(share), size))


def ring_bytes(buffer: int, expert: int) -> int:
    """Return the bytes of a ring for experts of `expert` bytes each, where the setting is `buffer`."""
    return max(buffer, PIECES * expert)
