"""`Sparsity`: how many positions sparse attention reads, how it finds them, and the bytes of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

IndexFormat = Literal["int4", "sign"]
FORMATS: Final[tuple[IndexFormat, ...]] = ("int4", "sign")
TOKENS: Final = 16  # of a block of codes: one instruction multiplies the block
_TOGETHER: Final = {"int4": 8, "sign": 32}  # neighbours of a key whose codes are four bytes
_CODE_BITS: Final = {"int4": 4, "sign": 1}
_SCALE_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that attention of new `tokens` reads: of the index, of the chosen positions, and of the whole cache."""

    index: int
    gathered: int
    dense: int
    tokens: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.index + other.index, self.gathered + other.gathered, self.dense + other.dense,
            self.tokens + other.tokens,
        )  # fmt: skip

    def __sub__(self, other: Traffic) -> Traffic:
        return self + Traffic(-other.index, -other.gathered, -other.dense, -other.tokens)

    @property
    def ratio(self) -> float:
        """The bytes of dense attention over those of sparse attention."""
        return self.dense / (self.index + self.gathered)


@dataclass(frozen=True, slots=True)
class Sparsity:
    """How sparse attention chooses: `k` positions with the greatest estimates, the first `sink`, the last `local`.

    Each query head chooses its own; with `shared`, the query heads of a key head choose together. `index` is the
    format of the keys' codes.
    """

    k: int
    sink: int
    local: int
    index: IndexFormat
    shared: bool

    @property
    def budget(self) -> int:
        """The most positions that a query reads; up to as many, attention is dense."""
        return self.k + self.sink + self.local

    def traffic(self, positions: int, heads: int, key_heads: int, row_bytes: int, key_width: int) -> Traffic:
        """Return the bytes of one step of one sequence. A position of a key head has `row_bytes` in the cache."""
        dense = positions * key_heads * row_bytes
        if positions <= self.budget:
            return Traffic(0, dense, dense, 1)
        choosing = key_heads if self.shared else heads
        index = positions * key_heads * token_bytes(self.index, key_width)
        return Traffic(index, choosing * self.budget * row_bytes, dense, 1)


def groups(index: IndexFormat, width: int) -> int:
    """Return the number of groups of neighbours that a key of `width` numbers has."""
    return math.ceil(width / _TOGETHER[index])


def block_bytes(index: IndexFormat, width: int) -> int:
    """Return the bytes of the codes of `TOKENS` keys."""
    return groups(index, width) * _TOGETHER[index] * _CODE_BITS[index] * TOKENS // 8


def token_bytes(index: IndexFormat, width: int) -> int:
    """Return the bytes of the codes and the scale of one key."""
    return block_bytes(index, width) // TOKENS + _SCALE_BYTES
