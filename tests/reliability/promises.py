"""What a run with a fault may leave, and how it may end: the promises that `sweep` and `processes` check.

In: the files of a command's place before, after a whole run, and after the run with the fault. Out: the broken ones:

* an error of the machine, also a process of the command's own that is killed, ends in one message and exit code 3,
  without a trace and without U099, or has no effect;
* each name has its whole content or what was there before, never a part;
* an error leaves nothing unfinished, and after a kill the same command succeeds and sweeps what the killed one left;
* SIGINT and SIGTERM end it with 130, and leave nothing unfinished.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reliability.faults import ENDING, KILL, Outcome

EXACT = (".safetensors", ".packed", ".gguf", ".so", ".pt", ".pth")  # the same size in each run
MAY_STAY = ("EROFS", "EMFILE", "EIO")  # the removal may have failed too
Sizes = dict[str, int]


@dataclass(frozen=True, slots=True)
class Expected:
    """The files of a command's names before a run and after a whole one."""

    before: Sizes
    after: Sizes


def sizes(place: Path, patterns: Sequence[str]) -> Sizes:
    """Return the sizes of all files at and below these names."""
    found = [path for pattern in patterns for path in place.glob(pattern)]
    files = [each for path in found for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]
    return {str(each.relative_to(place)): each.stat().st_size for each in files if "__pycache__" not in each.parts}


def unfinished(place: Path) -> list[str]:
    """Return what is left of writers that did not finish."""
    return [str(path.relative_to(place)) for path in place.rglob("*.writing*")]


def whole(found: Sizes, expected: Expected, names: Sequence[str], place: Path) -> str:
    """Return what is neither whole nor absent nor as before; files whose content is a run's times may differ."""
    before, after = expected.before, {**expected.after, **sizes_of_checkpoints(expected.after)}
    for name in (str(path.relative_to(place)) for pattern in names for path in place.glob(pattern)):
        own, wanted, old = (_of(name, each) for each in (found, after, before))
        if own not in (wanted, old):
            return f"{name} has {sorted(own ^ wanted)[:3]} more or less than a whole one"
        empty = [file for file in own if found[file] == 0 and after.get(file) != 0]
        if empty:
            return f"{empty[0]} is empty"
        torn = [file for file in own if file.endswith(EXACT) and found[file] not in (after.get(file), before.get(file))]
        if torn:
            return f"{torn[0]} has {found[torn[0]]} bytes of {after.get(torn[0])}"
    return ""


def _of(name: str, files: Sizes) -> set[str]:
    return {file for file in files if file == name or file.startswith(f"{name}/")}


def sizes_of_checkpoints(expected: Sizes) -> Sizes:
    """Return every checkpoint's files as those of the last one: older ones are gone at the end of a run."""
    last = {name: size for name, size in expected.items() if name.startswith("run/checkpoint-4/")}
    return {name.replace("-4/", f"-{step}/"): size for name, size in last.items() for step in range(1, 5)}


def broken_by_an_error(kind: str, outcome: Outcome, place: Path) -> Iterator[str]:
    """Yield what is wrong with the end of a run that met an error or an interrupt."""
    yield from broken_by_its_end(kind, outcome)
    left = unfinished(place)
    if left and not outcome.where.startswith(("unlink", "rmdir")) and kind not in MAY_STAY:
        yield f"left unfinished: {left}"


def broken_by_its_end(kind: str, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with how a run ended by itself; a process of its own may have been killed."""
    said = outcome.err
    if outcome.code not in (0, 130 if kind in ENDING else 3):
        yield f"exit code {outcome.code}: {said.strip()[-400:]}"
    if "Traceback" in said or "U099" in said:
        yield f"a trace or a bug: {said.strip()[-400:]}"
    if outcome.code not in (0, 130) and len(re.findall(r"^error\[\w+\]", said, re.MULTILINE)) != 1:
        yield f"not one message: {said.strip()[-400:]}"


def ending(kind: str, outcome: Outcome) -> str:
    """Return how a run ended, for the table."""
    if outcome.injected == 0:
        return "not reached"
    if outcome.killed and kind == KILL:
        return "killed"
    known = {0: "no effect", 3: "exit 3", 130: "exit 130"}
    return known.get(outcome.code, f"{kind}: exit {outcome.code}")
