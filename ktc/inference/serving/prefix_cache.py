"""`PrefixCache`: keys and values of earlier sequences, for prompts that begin as they do.

In: sequences, with numbers below 0 for images, and their keys and values. Out: the longest cached beginning of a
prompt, of the same adapter. The least recently used ones are dropped beyond a number of bytes, in which a page of
several sequences counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.inference.serving.pages import Page
from ktc.inference.serving.row_cache import CachedRow

_LEAST: Final = 16  # tokens: shorter beginnings are read again
_Beginning = tuple[str, tuple[int, ...]]  # an adapter, and the first tokens of a sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    beginning: _Beginning
    tokens: Tensor
    row: CachedRow


class PrefixCache:
    """Caches at most `limit` bytes; 0 caches nothing.

    A beginning that is returned has at least `_LEAST` tokens. So a prompt is compared with the sequences of the same
    first tokens only.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.nbytes = limit, 0
        self._entries: dict[_Entry, None] = {}  # least recently used first
        self._alike: dict[_Beginning, list[_Entry]] = {}
        self._pages = Counter[Page]()  # how many sequences each belongs to

    def length(self, adapter: str, tokens: Sequence[int], least: int = 0) -> int:
        """Return the number of tokens of a prompt that `find` would return."""
        return self._longest(adapter, tokens, least)[0]

    def find(self, adapter: str, tokens: Sequence[int], least: int = 0) -> CachedRow | None:
        """Return the longest cached beginning of a prompt, without its last token; None if it is short.

        It has at least `least` tokens.
        """
        length, entry = self._longest(adapter, tokens, least)
        if entry is None:
            return None
        self._use(entry)
        return entry.row.first(length)

    def add(self, adapter: str, tokens: Sequence[int], row: CachedRow) -> None:
        """Cache a sequence, whose tensors no other may share. It replaces those that it begins with."""
        if not len(tokens) >= _LEAST or row.tensor_bytes + len(row.pages) * row.page_bytes > self._limit:
            return
        new = _Entry(_beginning(adapter, tokens), torch.tensor(tokens), row)
        for entry in self._alike.get(new.beginning, [])[:]:
            common = _common(entry.tokens, new.tokens)
            if common == len(new.tokens) and (entry.row.is_whole or common == len(entry.tokens)):
                self._use(entry)
                return
            if common == len(entry.tokens) and row.is_whole:
                self._drop(entry)
        self._entries[new] = None
        self._alike.setdefault(new.beginning, []).append(new)
        added = [page for page in row.pages if page not in self._pages]
        self._pages.update(row.pages)
        self.nbytes += row.tensor_bytes + len(added) * row.page_bytes
        while self.nbytes > self._limit:
            self._drop(next(iter(self._entries)))

    def clear(self, adapter: str | None = None) -> None:
        """Drop the sequences of an adapter, or all."""
        for entry in [entry for entry in self._entries if adapter in (None, entry.beginning[0])]:
            self._drop(entry)

    def _use(self, entry: _Entry) -> None:
        del self._entries[entry]
        self._entries[entry] = None

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry]
        row = entry.row
        self._pages.subtract(row.pages)
        dropped = [page for page in row.pages if not self._pages[page]]
        for page in dropped:
            del self._pages[page]
        self.nbytes -= row.tensor_bytes + len(dropped) * row.page_bytes
        alike = self._alike[entry.beginning]
        alike.remove(entry)
        if not alike:
            del self._alike[entry.beginning]

    def _longest(self, adapter: str, tokens: Sequence[int], least: int) -> tuple[int, _Entry | None]:
        best, longest = 0, None
        alike = self._alike.get(_beginning(adapter, tokens), [])
        prompt = torch.tensor(tokens) if alike else None
        for entry in alike:
            assert prompt is not None
            if best and (len(entry.tokens) <= best or entry.tokens[best] != prompt[best]):
                continue  # no longer than the best: many sequences share a system prompt and no more
            common = min(_common(entry.tokens, prompt), len(tokens) - 1)
            whole = common == len(entry.tokens) or entry.row.is_whole
            if whole and common >= max(best + 1, _LEAST, least):
                best, longest = common, entry
        return best, longest


def _beginning(adapter: str, tokens: Sequence[int]) -> _Beginning:
    return adapter, tuple(tokens[:_LEAST])


def _common(one: Tensor, other: Tensor) -> int:
    """Return the number of equal tokens at the beginning."""
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero()
    return int(differ[0]) if len(differ) else shorter
