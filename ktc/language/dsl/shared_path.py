"""Find a path in the intersection of selections: a shortest-path search over the product of their automata.

Input: selections (globs, exceptions, layers) and a budget of steps. Output: a path that all of them select, or `None`.
Globs are walked segment by segment. The segments to distinguish are found by the same product over characters, so the
answer is exact. Refused: a search beyond the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ktc.language.dsl.globs import AnyDepth, Glob, Integers, TextSegment, compile_glob
from ktc.language.dsl.intervals import ANY_LAYER, Layers

_SPARE = "x"  # stands for the letters that no glob names
_DECIMALS = 200  # integers tried for a segment with a partial number such as `1*`


class OutOfBudget(Exception):
    """The search exceeds its budget."""


@dataclass(slots=True)
class Budget:
    """The number of remaining steps, shared by all searches."""

    steps: int

    def spend(self, steps: int = 1) -> None:
        """Consume steps. Raises OutOfBudget."""
        self.steps -= steps
        if self.steps < 0:
            raise OutOfBudget


@dataclass(frozen=True, slots=True)
class Selection:
    """The paths in these layers that match one of `at` and none of `except_`. Without `at`: all paths."""

    at: tuple[str, ...] = ()
    except_: tuple[str, ...] = ()
    layers: Layers = ANY_LAYER


_Positions = tuple[frozenset[int], ...]  # of one selection's globs


@dataclass(frozen=True, slots=True)
class _State:
    """The state of every glob after some segments. `numbered`: an integer segment, the layer, has been passed."""

    wanted: tuple[_Positions, ...]
    unwanted: _Positions
    numbered: bool


def shared_path(selections: tuple[Selection, ...], budget: Budget) -> str | None:
    """Return a shortest path in every selection, or `None`. Raises OutOfBudget. The globs must be valid."""
    if not _may_meet(selections, budget):
        return None
    return _Search(selections, budget).run()


class _Search:
    def __init__(self, selections: tuple[Selection, ...], budget: Budget) -> None:
        self.budget = budget
        self.wanted = tuple(tuple(map(compile_glob, s.at or ("**",))) for s in selections)
        self.unwanted = tuple(compile_glob(glob) for s in selections for glob in s.except_)
        self.layers = selections[0].layers
        for selection in selections[1:]:
            self.layers = self.layers.both(selection.layers)
        every = [glob for globs in (*self.wanted, self.unwanted) for glob in globs]
        self.cost = len(every)
        self.words = _words(every, budget)
        self.integers = _integers(every, self.layers)

    def run(self) -> str | None:
        first = _State(
            tuple(tuple(glob.start for glob in globs) for globs in self.wanted),
            tuple(glob.start for glob in self.unwanted),
            False,
        )
        seen = {first}
        waiting = deque[tuple[_State, tuple[str, ...]]]([] if self.layers.empty else [(first, ())])
        while waiting:
            state, path = waiting.popleft()
            for segment in self._segments(path):
                self.budget.spend(self.cost)
                following = self._step(state, segment)
                if following is None:
                    continue
                if self._accepts(following):
                    return ".".join((*path, segment))
                if following in seen:
                    continue
                seen.add(following)
                waiting.append((following, (*path, segment)))
        return None

    def _segments(self, path: tuple[str, ...]) -> Iterator[str]:
        """Yield the segments to try. A layer number follows `layers`; elsewhere names come first."""
        yield from (*self.integers, *self.words) if path and path[-1] == "layers" else (*self.words, *self.integers)

    def _step(self, state: _State, segment: str) -> _State | None:
        is_layer = segment.isdigit() and not state.numbered
        if is_layer and not self.layers.hold(int(segment)):
            return None
        wanted = tuple(
            tuple(glob.step(at, segment) for glob, at in zip(globs, positions, strict=True))
            for globs, positions in zip(self.wanted, state.wanted, strict=True)
        )
        if not all(any(positions) for positions in wanted):
            return None
        unwanted = tuple(glob.step(at, segment) for glob, at in zip(self.unwanted, state.unwanted, strict=True))
        return _State(wanted, unwanted, state.numbered or is_layer)

    def _accepts(self, state: _State) -> bool:
        reached = all(
            any(glob.accepts(at) for glob, at in zip(globs, positions, strict=True))
            for globs, positions in zip(self.wanted, state.wanted, strict=True)
        )
        refused = any(glob.accepts(at) for glob, at in zip(self.unwanted, state.unwanted, strict=True))
        return reached and not refused and (state.numbered or self.layers.without_number is True)


# Distinguishable segments --------------------------------------------------------------------------------------------
def _words(globs: Iterable[Glob], budget: Budget) -> list[str]:
    """Return one word for each distinguishable set of segments that match some word other than a number."""
    segments = {s.text: s for glob in globs for s in glob.segments if isinstance(s, TextSegment)}
    patterns = tuple(frozenset(segment.spellings) for segment in segments.values())
    letters = sorted({letter for spellings in patterns for text in spellings for letter in text} - {"*"})
    spare = _SPARE if _SPARE not in letters else next(c for c in "yzwvuzabcdefghijklmnopq_" if c not in letters)
    representatives: dict[tuple[bool, ...], str] = {}
    seen, waiting = {patterns}, deque([(patterns, "")])
    while waiting:
        rests, word = waiting.popleft()
        for letter in (spare, *letters):
            budget.spend(len(patterns))
            following = tuple(_after(letter, rest) for rest in rests)
            text = word + letter
            if not text.isdigit():
                representatives.setdefault(
                    tuple(any(not rest.strip("*") for rest in texts) for texts in following), text
                )
            key = following if not text.isdigit() else (*following, frozenset[str]())
            if key not in seen and any(following):
                seen.add(key)
                waiting.append((following, text))
    return list(representatives.values())


def _after(letter: str, rests: frozenset[str]) -> frozenset[str]:
    """Return the remainder of each alternative after a letter. `*` may consume the letter or have ended before it."""
    following: set[str] = set()
    for rest in rests:
        while rest.startswith("*"):
            following.add(rest)
            rest = rest[1:]
        if rest.startswith(letter):
            following.add(rest[1:])
    return frozenset(following)


def _integers(globs: Iterable[Glob], layers: Layers) -> list[str]:
    """Return the ends of all ranges, the numbers written in globs, and the first number."""
    numbers = {0, *layers.edges()}
    for glob in globs:
        for segment in glob.segments:
            if isinstance(segment, Integers):
                last = segment.first if segment.last is None else segment.last
                numbers |= {max(segment.first - 1, 0), segment.first, last, last + 1}
            elif isinstance(segment, TextSegment):
                numbers |= {int(text) for text in segment.spellings if text.isdigit()}
                if any("*" in text and text.strip("*").isdigit() for text in segment.spellings):
                    numbers |= set(range(_DECIMALS))
    return [str(number) for number in sorted(numbers)]


# A cheap test before the search --------------------------------------------------------------------------------------
def _may_meet(selections: tuple[Selection, ...], budget: Budget) -> bool:
    """Return False if the globs of two selections differ in a plain word at the same position from the front."""
    for index, first in enumerate(selections):
        for second in selections[:index]:
            budget.spend(max(1, len(first.at)) * max(1, len(second.at)))
            pairs = ((a, b) for a in first.at or ("**",) for b in second.at or ("**",))
            if not any(_agree(compile_glob(a), compile_glob(b)) for a, b in pairs):
                return False
    return True


def _agree(first: Glob, second: Glob) -> bool:
    for a, b in zip(first.segments, second.segments, strict=False):
        if isinstance(a, AnyDepth) or isinstance(b, AnyDepth):
            return True
        if isinstance(a, TextSegment) and a.plain and not b.accepts(a.text):
            return False
        if isinstance(b, TextSegment) and b.plain and not a.accepts(b.text):
            return False
    return True
