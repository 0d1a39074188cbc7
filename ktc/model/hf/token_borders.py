"""Where a part of a text begins among the tokens of the whole text.

In: a tokenizer, and a text with the text before it. Out: the token ids of the whole, and the number of those before
the part. The parts are never tokenised apart: a tokenizer may join the end of a prompt and the start of its answer, and
one that puts a space before every text would put it between the two. A part begins at the first token that the text
before it does not have when it is tokenised alone, as in TRL. Such a token may hold characters of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

Stretch = tuple[int, int]  # the first character of a token, and the one after its last


@dataclass(frozen=True, slots=True)
class Border:
    """`at` tokens come before the part. `alone` are tokens that only the text before it has, and the whole does not."""

    at: int
    alone: tuple[int, ...] = ()

    @property
    def is_inside_token(self) -> bool:
        return bool(self.alone)


class TextTokens:
    """The tokens of texts; with `special` including the special tokens that the tokenizer adds to every text."""

    def __init__(self, tokenizer: Any, *, special: bool) -> None:
        self.tokenizer = tokenizer
        self._special = special
        self._closing = _num_closing(tokenizer) if special else 0

    def ids(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return list(self.tokenizer(text, add_special_tokens=self._special)["input_ids"])

    def read(self, text: str) -> tuple[list[int], list[Stretch] | None]:
        """Return the token ids of `text`, and each token's first character and the one after its last.

        The places are None for a tokenizer in Python, which does not know them. A token without characters, such as a
        space that the tokenizer trims, is placed at the character before.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            return self.ids(text), None
        encoded = self.tokenizer(text, add_special_tokens=self._special, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [(first - (first == end), end) for first, end in encoded["offset_mapping"]]

    def border(self, before: str, ids: Sequence[int]) -> Border:
        """Return where the part after `before` begins in `ids`, the tokens of a text that begins with `before`."""
        alone = self.ids(before)
        at = shared_length(alone, ids)
        return Border(at, tuple(alone[at : len(alone) - self._closing]))

    def continued(self, before: str, part: str) -> tuple[list[int], int]:
        """Return the tokens of `before` and `part` together, up to the end of `part`, and how many come before it."""
        ids = self.ids(before + part)
        end = len(ids) - self._closing
        return ids[:end], min(self.border(before, ids).at, end)


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of tokens, or of characters, that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _num_closing(tokenizer: Any) -> int:
    """Return the number of special tokens after every text, as BERT's `[SEP]`."""
    bare, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    places = (at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare)
    return len(whole) - len(bare) - next(places, 0)
