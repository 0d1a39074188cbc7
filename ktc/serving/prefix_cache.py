"""`PrefixCache`: keys and values of earlier sequences, for prompts that begin as they do.

In: sequences with their keys and values. Out: the longest beginning of a prompt that is held, of the same adapter. The
least recently used ones are dropped beyond a number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.serving.row_cache import CachedRow

_LEAST: Final = 16  # tokens: shorter beginnings are read again


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    adapter: str
    tokens: Tensor
    row: CachedRow
    nbytes: int


class PrefixCache:
    """Holds at most `limit` bytes; 0 holds nothing."""

    def __init__(self, limit: int) -> None:
        self._limit, self._entries = limit, list[_Entry]()  # the last one was used last

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def length(self, adapter: str, tokens: Sequence[int]) -> int:
        """Return the number of tokens of a prompt that `find` would return."""
        return self._longest(adapter, tokens)[0]

    def find(self, adapter: str, tokens: Sequence[int]) -> CachedRow | None:
        """Return the longest beginning of a prompt that is held, without its last token; None if it is short."""
        length, entry = self._longest(adapter, tokens)
        if entry is None:
            return None
        self._entries.remove(entry)
        self._entries.append(entry)
        return entry.row.first(length)

    def add(self, adapter: str, tokens: Sequence[int], row: CachedRow) -> None:
        """Hold a sequence, whose tensors must be its own. It replaces those that it begins with."""
        if not len(tokens) >= _LEAST or row.nbytes > self._limit:
            return
        new = _Entry(adapter, torch.tensor(tokens), row, row.nbytes)
        for entry in [each for each in self._entries if each.adapter == adapter]:
            common = _common(entry.tokens, new.tokens)
            if common == len(new.tokens) and (entry.row.is_whole or common == len(entry.tokens)):
                self._entries.remove(entry)
                self._entries.append(entry)
                return
            if common == len(entry.tokens) and row.is_whole:
                self._entries.remove(entry)
        self._entries.append(new)
        while self.nbytes > self._limit:
            self._entries.pop(0)

    def clear(self, adapter: str | None = None) -> None:
        """Drop the sequences of an adapter, or all."""
        self._entries = [each for each in self._entries if adapter is not None and each.adapter != adapter]

    def _longest(self, adapter: str, tokens: Sequence[int]) -> tuple[int, _Entry | None]:
        best, found = 0, None
        prompt = torch.tensor(tokens)
        for entry in self._entries:
            if entry.adapter != adapter:
                continue
            common = min(_common(entry.tokens, prompt), len(tokens) - 1)
            whole = common == len(entry.tokens) or entry.row.is_whole
            if whole and common >= max(best + 1, _LEAST):
                best, found = common, entry
        return best, found


def _common(one: Tensor, other: Tensor) -> int:
    """Return the number of equal tokens at the beginning."""
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero()
    return int(differ[0]) if len(differ) else shorter
