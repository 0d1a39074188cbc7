"""The regular expressions of `match.name`, searched without backtracking.

In: the text of an expression out of an untrusted file. Out: an `Expression` that answers what `re.search` would answer.
Every part maps the set of places it may start at to the set of places it may end at, as the bits of one integer, so
the cost is bounded by the size of the expression times that of the path. Refused: back references, look-behind, named
groups, and whatever is over the limits below.

Python's `re` can take exponential time and cannot be interrupted, third-party engines with a timeout can still be made
to exhaust memory by nested counts, and engines in linear time know no look-ahead, which these files live from.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import NoReturn

MAX_LENGTH = 512
MAX_NESTING = 32
MAX_COUNT = 100  # of `{n,m}`
MAX_STEPS = 5_000  # of one search: an honest expression takes some dozens on a module path

_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_")
_DIGITS, _SPACE = frozenset(string.digits), frozenset(string.whitespace)
_PRINTABLE = frozenset(string.printable)
_POSITIVE = {"d": _DIGITS, "w": _WORD_CHARACTERS, "s": _SPACE}
_CLASSES = {**_POSITIVE, **{name.upper(): _PRINTABLE - accepted for name, accepted in _POSITIVE.items()}}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class ExpressionError(ValueError):
    """An expression that is malformed, not supported, or too much work."""


@dataclass(frozen=True, slots=True)
class _One:
    """One character of a set."""

    accepted: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Word:
    """Characters that stand for themselves, one after the other."""

    text: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Part
    fewest: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Ahead:
    part: _Part
    wanted: bool


@dataclass(frozen=True, slots=True)
class _Boundary:
    r"""`^`, `$`, `b` and `B` for `\b` and `\B`; `\A` is `^` and `\Z` is `$`, for a path is one line."""

    kind: str


_Part = _One | _Word | _Sequence | _Choice | _Repeat | _Ahead | _Boundary


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    root: _Part

    def found_in(self, path: str) -> bool:
        """Whether the expression matches anywhere in `path`. Raises ExpressionError where that is too much work."""
        return _Search(path).run(self.root)


def compile_expression(text: str) -> Expression:
    """Raises ExpressionError, with the place counted from 1, for what this dialect does not know."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters, this one has {len(text)}")
    return Expression(text, _Parser(text).parse())


class _Search:
    """One path. Bit i of a set stands for the place before character i."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.everywhere = (2 << len(path)) - 1
        self.steps = 0
        self.places: dict[frozenset[str], int] = {}

    def run(self, root: _Part) -> bool:
        return self.ends(root, self.everywhere) != 0

    def ends(self, part: _Part, starts: int) -> int:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ExpressionError(f"the expression takes more than {MAX_STEPS} steps on `{self.path}`")
        match part:
            case _One():
                return (starts & self.standing(part.accepted)) << 1
            case _Word():
                return (starts & self.occurrences(part.text)) << len(part.text)
            case _Sequence():
                for inner in part.parts:
                    starts = self.ends(inner, starts) if starts else 0
                return starts
            case _Choice():
                found = 0
                for option in part.options:
                    found |= self.ends(option, starts)
                return found
            case _Repeat():
                return self.repeated(part, starts)
            case _Ahead():
                bits = (1 << i for i in range(len(self.path) + 1) if starts >> i & 1)
                return sum(bit for bit in bits if (self.ends(part.part, bit) != 0) is part.wanted)
            case _Boundary():
                return starts & self.boundary(part.kind)

    def repeated(self, repeat: _Repeat, starts: int) -> int:
        for _ in range(repeat.fewest):
            starts = self.ends(repeat.part, starts) if starts else 0
        found = fresh = starts
        done = repeat.fewest
        while fresh and (repeat.most is None or done < repeat.most):
            fresh = self.ends(repeat.part, fresh) & ~found
            found |= fresh
            done += 1
        return found

    def standing(self, accepted: frozenset[str]) -> int:
        """The places before a character of the set."""
        if accepted not in self.places:
            self.places[accepted] = sum(1 << i for i, character in enumerate(self.path) if character in accepted)
        return self.places[accepted]

    def occurrences(self, word: str) -> int:
        found, at = 0, self.path.find(word)
        while at >= 0:
            found |= 1 << at
            at = self.path.find(word, at + 1)
        return found

    def boundary(self, kind: str) -> int:
        if kind == "^":
            return 1
        if kind == "$":
            return 1 << len(self.path)
        before, after = self.standing(_WORD_CHARACTERS) << 1, self.standing(_WORD_CHARACTERS)
        edges = before ^ after
        return edges if kind == "b" else self.everywhere & ~edges


class _Parser:
    """Recursive descent over the usual syntax."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def parse(self) -> _Part:
        part = self.choice()
        if self.at < len(self.text):
            self.fail("unbalanced `)`")
        return part

    def fail(self, message: str) -> NoReturn:
        raise ExpressionError(f"{message} at character {min(self.at, len(self.text)) + 1}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        character = self.peek()
        if not character:
            self.fail("unexpected end")
        self.at += 1
        return character

    def accept(self, word: str) -> bool:
        if not self.text.startswith(word, self.at):
            return False
        self.at += len(word)
        return True

    def choice(self) -> _Part:
        options = [self.sequence()]
        while self.accept("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def sequence(self) -> _Part:
        parts: list[_Part] = []
        while self.peek() not in ("", "|", ")"):
            part = self.repeat()
            word = _as_word(part)
            before = _as_word(parts[-1]) if parts else None
            if word is not None and before is not None:
                parts[-1] = _Word(before + word)
            else:
                parts.append(part)
        return _Sequence(tuple(parts))

    def repeat(self) -> _Part:
        start = self.at
        part = self.atom()
        counts = self.counts()
        if counts is None:
            return part
        if isinstance(part, _Boundary):
            self.at = start
            self.fail("nothing to repeat")
        self.accept("?")  # whether a repetition is lazy does not change whether it is found
        if self.peek() in ("*", "+", "?") or (self.peek() == "{" and self.counts() is not None):
            self.fail("a repetition of a repetition")
        return _Repeat(part, *counts)

    def counts(self) -> tuple[int, int | None] | None:
        """The bounds of the quantifier that stands here. A brace that is none is a plain character, as in `re`."""
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self.accept(sign):
                return bounds
        closing = self.text.find("}", self.at) if self.peek() == "{" else -1
        low, comma, high = self.text[self.at + 1 : max(closing, self.at + 1)].partition(",")
        plain = all(character in _DIGITS for character in low + high)
        if closing < 0 or not plain or not (low or (comma and high) or comma):
            return None
        fewest, most = int(low or 0), (int(high) if high else None) if comma else int(low)
        if max(fewest, most or 0) > MAX_COUNT:
            self.fail(f"a repetition of more than {MAX_COUNT}")
        if most is not None and most < fewest:
            self.fail("a repetition whose bounds are the wrong way round")
        self.at = closing + 1
        return fewest, most

    def atom(self) -> _Part:
        character = self.take()
        match character:
            case "(":
                return self.group()
            case "[":
                return _One(self.members())
            case ".":
                return _One(_PRINTABLE - {"\n"})
            case "^" | "$":
                return _Boundary(character)
            case "\\":
                return self.escape()
            case "*" | "+" | "?" | "{":
                self.at -= 1
                if self.counts() is not None:
                    self.fail("nothing to repeat")
                self.at += 1
                return _One(frozenset(character))
            case _:
                return _One(frozenset(character))

    def group(self) -> _Part:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"groups nested deeper than {MAX_NESTING}")
        wanted = True if self.accept("?=") else False if self.accept("?!") else None
        if wanted is None and not self.accept("?:") and self.peek() == "?":
            self.fail(f"the group `({self.text[self.at : self.at + 3]}` is not supported")
        part = self.choice()
        if not self.accept(")"):
            self.fail("`)` is missing")
        self.depth -= 1
        return part if wanted is None else _Ahead(part, wanted)

    def escape(self) -> _Part:
        character = self.take()
        if character in "bB":
            return _Boundary(character)
        if character in "AZ":
            return _Boundary("^" if character == "A" else "$")
        return _One(self.escaped(character))

    def escaped(self, character: str) -> frozenset[str]:
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROL:
            return frozenset(_CONTROL[character])
        if character in _WORD_CHARACTERS - {"_"}:
            self.at -= 1
            self.fail(f"the escape `\\{character}` is not supported")
        return frozenset(character)

    def members(self) -> frozenset[str]:
        """The characters of `[...]`, its bracket taken."""
        negated = self.accept("^")
        found: set[str] = set()
        first = True
        while first or self.peek() != "]":
            first = False
            low = self.member()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.member()
                if len(low) != 1 or len(high) != 1 or (last := ord(min(high))) < ord(min(low)):
                    self.fail("a bad range of characters")
                found |= {chr(code) for code in range(ord(min(low)), min(last, 127) + 1)} | high
            else:
                found |= low
        self.at += 1
        return _PRINTABLE - found if negated else frozenset(found)

    def member(self) -> frozenset[str]:
        character = self.take()
        if character != "\\":
            return frozenset(character)
        character = self.take()
        return frozenset("\b") if character == "b" else self.escaped(character)


def _as_word(part: _Part) -> str | None:
    if isinstance(part, _Word):
        return part.text
    return min(part.accepted) if isinstance(part, _One) and len(part.accepted) == 1 else None
