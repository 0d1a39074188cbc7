"""Sizes of the memory that streamed weights pass through, as the plan counts it and the ring takes it."""

from __future__ import annotations

from typing import Final

DEFAULT_BUFFER: Final = 1 << 30  # bytes of a ring: it hides 18 ms of other work on a bus of 55 GB/s
PIECES: Final = 4  # that a ring holds at least


def ring_bytes(buffer: int, expert: int) -> int:
    """Return the bytes of a ring for experts of `expert` bytes each, where the setting is `buffer`."""
    return max(buffer, PIECES * expert)
