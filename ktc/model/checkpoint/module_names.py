"""Match modules against a list of names in `quantization_config`.

Input: names, and patterns that begin with `re:`, as compressed-tensors writes them. Output: whether a module matches.
Patterns come from untrusted files, so no regular-expression engine runs them. Supported are literals, `.`, `.*`,
`\\d+`, `^`, `$`, `\\.` and `(one|other)`; anything else is refused (`UnreadablePattern`). Time is linear in the name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

_LONGEST = 200
_WORD = r"(?:[^\\.^$*+?{}\[\]()|]|\\\.)+"
_PIECE = re.compile(
    r"(?:(?P<rest>\.\*)|(?P<any>\.)|(?P<digits>\\d\+)|(?P<start>\^)|(?P<end>\$)"
    rf"|\((?:\?:)?(?P<choice>{_WORD}(?:\|{_WORD})*)\)|(?P<word>{_WORD}))(?![*+?{{])"
)
_Kind = Literal["rest", "any", "digits", "start", "end", "choice", "word"]


class UnreadablePattern(Exception):
    """An unsupported pattern; carries the message."""


@dataclass(frozen=True, slots=True)
class _Piece:
    kind: _Kind
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pattern:
    text: str
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Modules by full name and by patterns that match the start of their names."""

    exact: frozenset[str] = frozenset()
    patterns: tuple[_Pattern, ...] = ()

    def entry_for(self, module: str) -> str | None:
        """Return the list's entry that matches `module`, as written there."""
        if module in self.exact:
            return module
        return next((pattern.text for pattern in self.patterns if _begins(pattern.pieces, module)), None)


def read_names(entries: Iterable[str]) -> ModuleNames:
    """Return the names of a list. Raises `UnreadablePattern` at the first unsupported pattern."""
    exact: list[str] = []
    patterns: list[_Pattern] = []
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(_Pattern(entry, tuple(_pieces(entry.removeprefix("re:")))))
        else:
            exact.append(entry)
    return ModuleNames(frozenset(exact), tuple(patterns))


def _pieces(pattern: str) -> Iterator[_Piece]:
    if len(pattern) > _LONGEST:
        raise UnreadablePattern(
            f"pattern `{pattern[:40]}...` has {len(pattern)} characters, at most {_LONGEST} are read"
        )
    place = 0
    while place < len(pattern):
        piece = _PIECE.match(pattern, place)
        if piece is None:
            allowed = r"literals, `.`, `.*`, `\d+`, `^`, `$`, `\.` and `(one|other)`"
            raise UnreadablePattern(
                f"pattern `{pattern}` cannot be read from `{pattern[place:]}` on, expected {allowed}"
            )
        kind = cast("_Kind", piece.lastgroup)
        words = piece[kind].replace("\\.", ".").split("|") if kind in ("choice", "word") else ()
        yield _Piece(kind, tuple(words))
        place = piece.end()


def _begins(pieces: Iterable[_Piece], name: str) -> bool:
    """Return whether the sequence of pieces matches from the start of `name`."""
    ends: Collection[int] = (0,)
    for piece in pieces:
        ends = _after(piece, name, ends)
        if not ends:
            return False
    return True


def _after(piece: _Piece, name: str, starts: Collection[int]) -> Collection[int]:
    """Return every position at which the piece can end if it begins at one of `starts`."""
    match piece.kind:
        case "rest":
            return range(min(starts), len(name) + 1)
        case "any":
            return {start + 1 for start in starts if start < len(name)}
        case "digits":
            return set(_ends_of_digits(name, starts))
        case "start":
            return (0,) if 0 in starts else ()
        case "end":
            return (len(name),) if len(name) in starts else ()
        case "choice" | "word":
            return {end for word in piece.words for end in _ends_of_word(word, name, starts)}


def _ends_of_digits(name: str, starts: Collection[int]) -> Iterator[int]:
    inside = False
    for place in range(min(starts), len(name)):
        inside = name[place].isdecimal() and (inside or place in starts)
        if inside:
            yield place + 1


def _ends_of_word(word: str, name: str, starts: Collection[int]) -> Iterator[int]:
    if not isinstance(starts, range):
        yield from (start + len(word) for start in starts if name.startswith(word, start))
        return
    place = name.find(word, starts.start)  # after `.*` the positions are a range up to the end
    while place >= 0:
        yield place + len(word)
        place = name.find(word, place + 1)
