"""`Int8Band`: codes and scales of several sequences in two `Band`s, with the interface of one.

In: rows of int8 codes (heads, length, width), then numbers (rows, heads, T, width) of all of them, which become codes.
Out: `Int8Tensor`s, views of the memory.
"""

from __future__ import annotations

from typing import Final, cast

from torch import Tensor

from ktc.attention.int8_tensor import Int8Tensor
from ktc.serving.band import ROOM, Band


class Int8Band:
    """A band of codes, and one of their scales."""

    def __init__(self, like: Int8Tensor, room: int = ROOM, steady: int = 0) -> None:
        """Make an empty band for rows such as `like` (heads, any length, width)."""
        self._dtype: Final = like.dtype
        self._codes, self._scales = Band(like.codes, room, steady), Band(like.scales, room, steady)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    @property
    def rows(self) -> int:
        return self._codes.rows

    @property
    def width(self) -> int:
        """The number of columns in use."""
        return self._codes.width

    def view(self) -> Int8Tensor:
        """Return all rows, (rows, heads, columns in use, width of a key)."""
        return Int8Tensor(self._codes.view(), self._scales.view(), self._dtype)

    def row(self, at: int, length: int) -> Int8Tensor:
        """Return the last `length` columns of a row."""
        return Int8Tensor(self._codes.row(at, length), self._scales.row(at, length), self._dtype)

    def join(self, row: Tensor) -> None:
        """Add a row of codes (heads, length, width) after the others."""
        held = cast("Int8Tensor", row)
        self._codes.join(held.codes)
        self._scales.join(held.scales)

    def leave(self, at: int) -> None:
        """Remove a row: the last one takes its slot."""
        self._codes.leave(at)
        self._scales.leave(at)

    def trim(self, width: int) -> None:
        """Keep the last `width` columns of all rows."""
        self._codes.trim(width)
        self._scales.trim(width)

    def clear(self) -> None:
        """Remove all rows."""
        self._codes.clear()
        self._scales.clear()

    def append(self, new: Tensor) -> Int8Tensor:
        """Append the codes of (rows, heads, T, width) and return all columns."""
        added = Int8Tensor.of(new)
        return Int8Tensor(self._codes.append(added.codes), self._scales.append(added.scales), self._dtype)


def band_for(like: Tensor, room: int, steady: int) -> Band | Int8Band:
    """Return an empty band for rows such as `like`: numbers or codes."""
    return Int8Band(like, room, steady) if isinstance(like, Int8Tensor) else Band(like, room, steady)
