"""Sizes of the memory that streamed weights pass through, and of the chunks that experts on a GPU are computed in.

The plan counts them as the ring and the stream take them.
"""

from __future__ import annotations

from typing import Final

DEFAULT_BUFFER: Final = 1 << 30  # bytes of a ring: it hides 18 ms of other work on a bus of 55 GB/s
# Rows of an expert, on average, that a GPU multiplies with codes. A copy and `grouped_mm` take 0.7 of the time for 256,
# but a call of resident experts would be cut into chunks for it, which wait for Python.
MOST_ROWS: Final = 256
PIECES: Final = 4  # that a ring holds at least

CHUNK_BYTES: Final = 128 << 20  # of decoded matrices: enough rows for a grouped product, little beside a model
_CHUNKS: Final = 32  # of a layer at most, where the ring holds such pieces: each costs the host half a millisecond
_PLAIN_CHUNKS: Final = 4  # of plain weights that stay, which take no memory beside their rows


def experts_per_chunk(experts: int, decoded: int, chunk_bytes: int = CHUNK_BYTES, *, plain_resident: bool) -> int:
    """Return how many of a layer's experts a chunk has at least; `decoded` are the bytes of one as it is multiplied."""
    return max(1, chunk_bytes // decoded, -(-experts // (_PLAIN_CHUNKS if plain_resident else _CHUNKS)))


def ring_bytes(buffer: int, expert: int) -> int:
    """Return the bytes of a ring for experts of `expert` bytes each, where the setting is `buffer`."""
    return max(buffer, PIECES * expert)
