"""Path globs: `*` matches one segment or a part of one, `**` any number of segments, `{a,b}` a choice.

`[3..60]` and `[3..]` match a whole integer segment. A glob is anchored at both ends. Regular expressions are refused,
with their position in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

MAX_LENGTH = 512
MAX_SEGMENTS = 32
MAX_CHOICES = 64  # product of the `{a,b}` of one segment
MAX_STARS = 4  # in one segment: bounds the cost of its regular expression
_INTEGERS = re.compile(r"\[([0-9]{1,9})\.\.([0-9]{0,9})\]")
_PIECES = re.compile(r"(\{[^{}]*\}|\*)")


class GlobError(ValueError):
    """An invalid glob. `offset` and `length` locate the fault inside the glob's text."""

    def __init__(self, message: str, offset: int, length: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.length = length


@dataclass(frozen=True, slots=True)
class AnyDepth:
    """`**`"""


@dataclass(frozen=True, slots=True)
class Integers:
    """`[first..last]`; `last` is `None` for an open range."""

    first: int
    last: int | None

    def accepts(self, segment: str) -> bool:
        if not (segment.isascii() and segment.isdigit()):
            return False
        return self.first <= int(segment) and (self.last is None or int(segment) <= self.last)


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A segment of text, `*` and choices."""

    text: str
    regex: re.Pattern[str]

    @property
    def plain(self) -> bool:
        """Return whether the segment is one fixed word."""
        return not ("*" in self.text or "{" in self.text)

    @property
    def spellings(self) -> Iterator[str]:
        """Yield the words that the segment matches, with its choices expanded and `*` unchanged."""
        parts = [piece[1:-1].split(",") if piece.startswith("{") else [piece] for piece in _PIECES.split(self.text)]
        return ("".join(map(str.strip, choice)) for choice in product(*parts))

    def accepts(self, segment: str) -> bool:
        return self.regex.fullmatch(segment) is not None


Segment = AnyDepth | Integers | TextSegment


@dataclass(frozen=True, slots=True)
class Glob:
    segments: tuple[Segment, ...]

    def matches(self, path: str) -> bool:
        """Return whether the whole dotted path is matched; the empty path has no segments."""
        positions = self.start
        for part in path.split(".") if path else ():
            positions = self.step(positions, part)
        return self.accepts(positions)

    @property
    def start(self) -> frozenset[int]:
        """Return the positions before any segment is read; a position is a number of glob segments passed."""
        return self._skip_any_depth({0})

    def step(self, positions: frozenset[int], part: str) -> frozenset[int]:
        """Return the positions after one more path segment; empty if the glob can no longer match."""
        following: set[int] = set()
        for position in positions - {len(self.segments)}:
            segment = self.segments[position]
            if isinstance(segment, AnyDepth):
                following.add(position)
            elif segment.accepts(part):
                following.add(position + 1)
        return self._skip_any_depth(following)

    def accepts(self, positions: frozenset[int]) -> bool:
        """Return whether a path that led to these positions is matched."""
        return len(self.segments) in positions

    def _skip_any_depth(self, positions: set[int]) -> frozenset[int]:
        """Add the positions reached when `**` matches no segment."""
        for position, segment in enumerate(self.segments):
            if position in positions and isinstance(segment, AnyDepth):
                positions.add(position + 1)
        return frozenset(positions)


def matches(glob: str, path: str) -> bool:
    """Return whether the glob matches the dotted path. Raises GlobError for a malformed glob."""
    return compile_glob(glob).matches(path)


def is_glob(text: str) -> bool:
    try:
        compile_glob(text)
    except GlobError:
        return False
    return True


@lru_cache(maxsize=4096)
def compile_glob(glob: str) -> Glob:
    """Return the compiled glob. Raises GlobError, located inside the text, if it is malformed."""
    if len(glob) > MAX_LENGTH:
        raise GlobError(f"a glob has at most {MAX_LENGTH} characters", 0, len(glob))
    pieces = _split(glob)
    if len(pieces) > MAX_SEGMENTS:
        raise GlobError(f"a glob has at most {MAX_SEGMENTS} segments", 0, len(glob))
    return Glob(tuple(_segment(text, offset) for text, offset in pieces))


def _split(glob: str) -> list[tuple[str, int]]:
    """Return the segments with their offsets: split at dots outside brackets."""
    pieces: list[tuple[str, int]] = []
    start = 0
    closing = ""
    for offset, character in enumerate(glob):
        if closing and character == closing:
            closing = ""
        elif character in "{[" and not closing:
            closing = "}" if character == "{" else "]"
        elif character in "{[}]":
            raise GlobError(f"unbalanced `{character}`", offset, 1)
        elif character == "." and not closing:
            pieces.append((glob[start:offset], start))
            start = offset + 1
    if closing:
        raise GlobError(f"`{closing}` is missing", start, len(glob) - start)
    return [*pieces, (glob[start:], start)]


def _segment(text: str, offset: int) -> Segment:
    if text == "**":
        return AnyDepth()
    if integers := _INTEGERS.fullmatch(text):
        first, last = int(integers[1]), int(integers[2]) if integers[2] else None
        if last is not None and first > last:
            raise GlobError(f"the range {text} is empty", offset, len(text))
        return Integers(first, last)
    _refuse(text, offset)
    return TextSegment(text, re.compile("".join(_regex(piece) for piece in _PIECES.split(text))))


def _choices(text: str) -> int:
    return prod(piece.count(",") + 1 for piece in _PIECES.split(text) if piece.startswith("{"))


def _refuse(text: str, offset: int) -> None:
    if not text:
        raise GlobError("a path segment is empty", offset, 1)
    if "**" in text:
        raise GlobError("`**` must be a whole segment", offset, len(text))
    if regex := re.search(r"[\\^$()|+?]", text):
        raise GlobError("this looks like a regular expression, paths use globs", offset + regex.start(), 1)
    if "[" in text:
        raise GlobError("an integer range is a whole segment such as [3..60]", offset, len(text))
    if text.count("*") > MAX_STARS:
        raise GlobError(f"a segment has at most {MAX_STARS} `*`", offset, len(text))
    if _choices(text) > MAX_CHOICES:
        raise GlobError(f"a segment has at most {MAX_CHOICES} choices", offset, len(text))
    if wrong := re.search(r"[^\w*{},\-]", text):
        raise GlobError(f"unexpected `{wrong[0]}`", offset + wrong.start(), 1)


def _regex(piece: str) -> str:
    if piece.startswith("{"):
        choices = (choice.strip() for choice in piece[1:-1].split(","))
        return f"(?:{'|'.join(_words(choice) for choice in choices)})"
    return _words(piece)


def _words(text: str) -> str:
    return "[^.]*".join(re.escape(word) for word in text.split("*"))
