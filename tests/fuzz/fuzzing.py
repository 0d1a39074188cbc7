"""One kind of input under mutation: a corpus that grows, a judge of each outcome, and what was found.

In: a `Kind`, a folder to work in, a time or a number of mutants. Out: `Tally`. An outcome is an acceptance, or a
refusal by its code and its message without names and numbers. A mutant with an outcome that was not seen before joins
the corpus. A fault is any other exception, a refusal without a place, more than a second, or more than 256 MiB.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from fuzz.mutate import Mutate
from ktc.diagnostics import InputRefused, render, to_json

SECONDS = 1.0  # of processor time, of one mutant
MEMORY = 256 << 20  # bytes that one mutant may add to the peak of the process
LONGEST_MESSAGE = 20_000
MOST_KEPT = 3000  # mutants of the corpus
LARGEST_KEPT = 1 << 16  # bytes: mutants of mutants grow


class Hang(BaseException):
    """A mutant took too long. Not an `Exception`: code under test may catch those."""


class Unsound(Exception):
    """A refusal without a place, or a value that should not have been accepted."""


@dataclass(frozen=True, slots=True)
class Original:
    """A whole input: the file of the folder that it is written to, and how it is mutated."""

    file: str
    content: bytes
    mutate: Mutate


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of input. `prepare` fills a folder with whole inputs; `read` reads it as ktc does and checks the value."""

    name: str
    prepare: Callable[[Path], Sequence[Original]]
    read: Callable[[Path], object]


@dataclass(slots=True)
class Tally:
    """What became of the mutants of a kind. `faults` has a file name and a reason for each different fault."""

    kind: str
    mutants: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    refused: dict[str, int] = field(default_factory=dict[str, int])  # by code
    faults: dict[str, str] = field(default_factory=dict[str, str])
    hangs: int = 0
    traces: int = 0
    kept: int = 0

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the tally of another process, as `asdict` writes it."""
        for name in ("mutants", "accepted", "seconds", "hangs", "traces"):
            setattr(self, name, getattr(self, name) + other[name])
        self.slowest, self.kept = max(self.slowest, other["slowest"]), max(self.kept, other["kept"])
        for code, number in other["refused"].items():
            self.refuse(code, number)
        self.faults.update(other["faults"])

    def refuse(self, code: str, number: int = 1) -> None:
        """Count refusals with `code`."""
        self.refused[code] = self.refused.get(code, 0) + number


def run(kind: Kind, folder: Path, corpus: Path | None, chance: Random, *, seconds: float, most: int) -> Tally:
    """Read mutants of a kind until the time or the number is used up. Faults are kept in `corpus`/faults."""
    tally = Tally(kind.name)
    folder.mkdir(parents=True, exist_ok=True)
    originals = kind.prepare(folder)
    kept = [*originals, *_stored(corpus, originals)]
    others = {each.file: [one.content for one in originals if one.file == each.file] for each in originals}
    seen = {outcome(kind, folder)[0]}
    begun = stop = time.perf_counter()
    stop += seconds
    with _interrupted():
        while tally.mutants < most and time.perf_counter() < stop:
            base = chance.choice(originals) if chance.randrange(3) == 0 else chance.choice(kept)
            mutant = Original(base.file, base.mutate(base.content, chance, others[base.file]), base.mutate)
            found = _try(kind, folder, mutant, tally)
            if found not in seen:
                seen.add(found)
                if len(kept) < MOST_KEPT and len(mutant.content) < LARGEST_KEPT:
                    kept.append(mutant)
                    _store(corpus, mutant)
    tally.seconds = time.perf_counter() - begun
    tally.kept = len(kept) - len(originals)
    return tally


def _try(kind: Kind, folder: Path, mutant: Original, tally: Tally) -> str:
    path = folder / mutant.file
    whole = path.read_bytes() if path.is_file() else None
    path.write_bytes(mutant.content)
    peak, begun = _peak(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    fault = said = ""
    try:
        found, accepted = outcome(kind, folder)
        tally.accepted += accepted
        if not accepted:
            tally.refuse(found.partition(" ")[0])
    except Hang:
        tally.hangs += 1
        found = fault = f"more than {SECONDS:g} s at {_last_line()}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - any is what is looked for, and a panic of Rust is no `Exception`
        tally.traces += 1
        found = fault = f"{type(error).__name__} at {_last_line(error)}"
        said = f": {_words(str(error))[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    taken = time.process_time() - begun
    tally.mutants += 1
    tally.slowest = max(tally.slowest, taken)
    if not fault and _peak() - peak > MEMORY:
        found = fault = f"more than {MEMORY >> 20} MiB: {_peak() - peak >> 20}"
        tally.traces += 1
    if fault and not any(known.startswith(fault) for known in tally.faults.values()):
        name = f"{kind.name}-{hashlib.sha256(mutant.content).hexdigest()[:12]}--{mutant.file.replace('/', '--')}"
        tally.faults[name] = fault + said
        faults = folder.parent / "faults"
        faults.mkdir(exist_ok=True)
        (faults / name).write_bytes(mutant.content)
    if whole is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(whole)
    return found


def outcome(kind: Kind, folder: Path) -> tuple[str, bool]:
    """Return what became of the input in `folder`, and whether it was accepted. Raises anything that is a fault."""
    try:
        kind.read(folder)
    except InputRefused as refused:
        return _judged(refused), False
    return "accepted", True


def _judged(refused: InputRefused) -> str:
    """Return a refusal's code and message without names and numbers. Raises Unsound for one without a place."""
    for diagnostic in refused.diagnostics:
        if diagnostic.span is None and "`" not in diagnostic.message:
            raise Unsound(f"no place in `{diagnostic.message[:200]}`")
        if len(diagnostic.message) > LONGEST_MESSAGE:
            raise Unsound(f"a message of {len(diagnostic.message)} characters: {diagnostic.message[:100]}")
        json.dumps(to_json(diagnostic, refused.sources)).encode()
    render(refused.diagnostics[:3], refused.sources).encode()
    first = refused.diagnostics[0]
    return f"{first.code} {_words(first.message)[:160]}"


def _words(message: str) -> str:
    return re.sub(r"`[^`]*`|\d+|'[^']*'", "_", message)


def _last_line(error: BaseException | None = None) -> str:
    """Return the deepest place of ktc in a trace."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else _hung
    own = [frame for frame in frames if "/ktc/" in frame.filename] or list(frames)
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"


_hung: list[traceback.FrameSummary] = []


@contextmanager
def _interrupted() -> Iterator[None]:
    """Raise Hang where a mutant runs out of processor time."""

    def stop(_: int, frame: FrameType | None) -> None:
        _hung[:] = traceback.extract_stack(frame)
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _stored(corpus: Path | None, originals: Sequence[Original]) -> Iterator[Original]:
    """Yield the mutants of earlier runs."""
    if corpus is None or not corpus.is_dir():
        return
    by_file = {each.file.replace("/", "--"): each for each in originals}
    for path in sorted(corpus.iterdir())[:MOST_KEPT]:
        of = by_file.get(path.name.partition("--")[2])
        if of is not None:
            yield Original(of.file, path.read_bytes(), of.mutate)


def _store(corpus: Path | None, mutant: Original) -> None:
    if corpus is None:
        return
    corpus.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(mutant.content).hexdigest()[:16]
    (corpus / f"{name}--{mutant.file.replace('/', '--')}").write_bytes(mutant.content)
