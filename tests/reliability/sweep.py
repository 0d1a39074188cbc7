"""Every write of every command fails, or is the last one: the sweep behind the table in docs/details/reliability.md.

    python -m reliability.sweep [NAME ...] [--jobs 16] [--kinds ENOSPC EIO SIGKILL] [--seconds 540] [-o RUNS]

(with tests and tests/support on the path). In: the names of commands (all), the kinds of faults (all), and how many of
a command's calls are tried per kind (all, but 6 of the kernel cache). Out: a row per command, and every run that broke
one of the `promises`; exit code 1 then.

`-o` keeps the runs, one JSON object per line. A sweep that `--seconds` ended goes on from there: runs that are in the
file are counted, and not repeated. With `--kills N` each command is killed N times, at calls that are drawn with
`--seed`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from reliability.commands import COMMANDS, Command
from reliability.faults import ENDING, ERRORS, KILL
from reliability.promises import Expected, ending
from reliability.workers import Worker, Workers

Choose = Callable[[Command, int], Sequence[int]]
ENDS = ("exit 3", "exit 130", "no effect", "killed")


@dataclass(frozen=True, slots=True)
class Try:
    """A command and the fault that it is to meet at its call number `at`; `draw` tells equal ones apart."""

    command: str
    kind: str
    at: int
    draw: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A try, how it ended, the call that failed, and the promises that were broken."""

    what: Try
    ended: str
    where: str
    broken: tuple[str, ...]

    def line(self) -> str:
        """Return it as JSON."""
        return json.dumps({**asdict(self.what), "ended": self.ended, "where": self.where, "broken": self.broken}) + "\n"


def of_line(line: str) -> Run:
    """Return the run of a line."""
    row = json.loads(line)
    what = Try(row["command"], row["kind"], row["at"], row["draw"])
    return Run(what, row["ended"], row["where"], tuple(row["broken"]))


@dataclass(slots=True)
class Row:
    """Of one command: per kind of fault its calls and its files, the runs that are asked, those that ended."""

    command: Command
    calls: dict[str, int] = field(default_factory=dict[str, int])
    expected: dict[str, Expected] = field(default_factory=dict[str, Expected])
    asked: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    broken: list[str] = field(default_factory=list[str])

    def add(self, run: Run) -> None:
        """Count a run that ended."""
        self.ended[run.ended] += 1
        self.broken += [f"{run.what.kind} at {run.what.at} ({run.where}): {each}" for each in run.broken]


class Sweep:
    """The rows of some commands, and the file of the runs that ended."""

    def __init__(self, workers: Workers, commands: Sequence[Command], file: Path | None = None) -> None:
        self._workers, self._file = workers, file
        self.rows = {command.name: Row(command) for command in commands}

    def count(self, kinds: Sequence[str]) -> None:
        """Run each command without a fault, and count its calls per kind."""
        self._workers.warm([row.command for row in self.rows.values()])
        pairs = [(row, kind) for row in self.rows.values() for kind in kinds]
        for (row, kind), (outcome, expected) in self._workers.map(lambda on, it: on.count(it[0].command, it[1]), pairs):
            row.calls[kind], row.expected[kind] = outcome.calls, expected
            if outcome.code != 0:
                row.broken.append(f"without a fault it ends with {outcome.code}: {outcome.err[-300:]}")

    def tries(self, choose: Choose) -> list[Try]:
        """Count the runs that have ended before, and return the others."""
        lines = self._file.read_text().splitlines() if self._file is not None and self._file.exists() else []
        known = {run.what: run for run in map(of_line, lines)}
        left: list[Try] = []
        for row in self.rows.values():
            if row.broken:
                continue
            asked = [
                Try(row.command.name, kind, at, draw)
                for kind, calls in row.calls.items()
                for draw, at in numbered(choose(row.command, calls))
            ]
            row.asked = len(asked)
            for each in asked:
                row.add(known[each]) if each in known else left.append(each)
        return left

    def run(self, tries: Sequence[Try]) -> Iterator[Run]:
        """Try these, and yield each run when it ends."""
        for _, run in self._workers.map(self._run, tries):
            self.rows[run.what.command].add(run)
            if self._file is not None:
                with self._file.open("a") as lines:
                    lines.write(run.line())
            yield run

    def _run(self, worker: Worker, what: Try) -> Run:
        row = self.rows[what.command]
        outcome, broken = worker.attempt(row.command, what.kind, what.at, row.expected[what.kind])
        return Run(what, ending(what.kind, outcome), outcome.where, tuple(broken))


def numbered(calls: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each call with the number of times that it came before."""
    seen: Counter[int] = Counter()
    for at in calls:
        yield seen[at], at
        seen[at] += 1


def points(calls: int, most: int | None) -> list[int]:
    """Return the numbers of the calls to try: all, or `most` of them, evenly spread and the same each time."""
    if most is None or calls <= most:
        return list(range(1, calls + 1))
    return sorted({1 + round(index * (calls - 1) / max(1, most - 1)) for index in range(most)})


def drawn(calls: int, number: int, chance: Random) -> list[int]:
    """Return the numbers of this many calls, at random."""
    return [chance.randint(1, calls) for _ in range(number)]


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown. Its `calls` are those that change a file."""
    lines = [
        "| command | calls | asked | runs | exit 3 | exit 130 | no effect | killed | not reached | broken promises |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        counted = [row.ended[name] for name in (*ENDS, "not reached")]
        figures = (max(row.calls.values(), default=0), row.asked, row.ended.total(), *counted, len(row.broken))
        lines.append(f"| `{row.command.name}` | {' | '.join(f'{each:,}' for each in figures)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="commands of commands.py; default: all")
    parser.add_argument("--most", type=int, help="calls of a command per kind of fault; default: all")
    parser.add_argument("--kinds", nargs="*", default=[*ERRORS, *ENDING, KILL])
    parser.add_argument("--kills", type=int, default=0, help="only SIGKILL, so many times for each command")
    parser.add_argument("--seed", type=int, default=0, help="of the calls that `--kills` draws")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time; default: CPUs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--work", type=Path, help="a folder whose prepared models are kept for the next sweep")
    parser.add_argument("-o", type=Path, help="keep the runs in this file, and do not repeat those that it has")
    return parser.parse_args()


def main() -> None:
    """Sweep the named commands, print the table, and fail if a promise was broken."""
    asked = arguments()
    began = time.monotonic()

    def choose(command: Command, calls: int) -> list[int]:
        if asked.kills:
            return drawn(calls, asked.kills, Random(asked.seed))
        return points(calls, asked.most or command.most)

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s: {text}", flush=True)

    chosen = [each for each in COMMANDS if not asked.names or each.name in asked.names]
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        work = (asked.work or Path(name)).resolve()
        with Workers(work, asked.jobs, began + asked.seconds) as workers:
            sweep = Sweep(workers, chosen, asked.o)
            tell("the models are made")
            sweep.count([KILL] if asked.kills else asked.kinds)
            tries = sweep.tries(choose)
            tell(f"{len(tries):,} runs of {len(chosen)} commands")
            for row in sweep.rows.values():
                for broken in row.broken:
                    tell(f"BROKEN {row.command.name}: {broken}")
            for number, run in enumerate(sweep.run(tries), 1):
                for broken in run.broken:
                    tell(f"BROKEN {run.what.command}: {run.what.kind} at {run.what.at} ({run.where}): {broken}")
                if number % 100 == 0:
                    tell(f"{number:,} of {len(tries):,} runs")
    rows = list(sweep.rows.values())
    print(table(rows), *(f"{row.command.name}: BROKEN {each}" for row in rows for each in row.broken), sep="\n")
    sys.exit(any(row.broken for row in rows))


if __name__ == "__main__":
    main()
