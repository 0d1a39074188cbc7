"""Every write of every command fails, or is the last one: the sweep behind the table in docs/reliability.md.

In: the names of commands (all), and how many of a command's calls are tried per kind of fault (all). Out: a row per
command, and every run that broke a promise:

* an error of the machine ends in one message and exit code 3, without a trace and without U099, or has no effect;
* each name has its whole content or what was there before, never a part;
* an error leaves nothing unfinished, and after a kill the same command succeeds and sweeps what the killed one left;
* SIGINT and SIGTERM end it with 130, and leave nothing unfinished.

With `--kills N` each command is killed N times, at calls that are drawn with `--seed`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from reliability.commands import COMMANDS, Command, prepare
from reliability.faults import ENDING, ERRORS, KILL, Fault, Forked, Outcome

LASTING = frozenset(
    {"ENOSPC", "EDQUOT", "EROFS"}
)  # a full disk stays full; a read or a descriptor may succeed next time
Sizes = dict[str, int]


@dataclass(slots=True)
class Row:
    """Of one command: its calls, the runs by how they ended, and the broken promises."""

    name: str
    calls: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def sizes(place: Path, patterns: Sequence[str]) -> Sizes:
    """Return the sizes of all files at and below these names."""
    found = [path for pattern in patterns for path in place.glob(pattern)]
    files = [each for path in found for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]
    return {str(each.relative_to(place)): each.stat().st_size for each in files if "__pycache__" not in each.parts}


def unfinished(place: Path) -> list[str]:
    """Return what is left of writers that did not finish."""
    return [str(path.relative_to(place)) for path in place.rglob("*.writing*")]


def whole(found: Sizes, expected: Sizes, before: Sizes, names: Sequence[str], place: Path) -> str:
    """Return what is neither whole nor absent nor as before; files whose content is a run's times may differ."""
    for pattern in names:
        for path in place.glob(pattern):
            name = str(path.relative_to(place))
            own = {file for file in found if file == name or file.startswith(f"{name}/")}
            wanted = {file for file in expected if file == name or file.startswith(f"{name}/")}
            old = {file for file in before if file == name or file.startswith(f"{name}/")}
            if own not in (wanted, old):
                return f"{name} has {sorted(own ^ wanted)[:3]} more or less than a whole one"
            empty = [file for file in own if found[file] == 0 and expected.get(file) != 0]
            if empty:
                return f"{empty[0]} is empty"
            exact = [file for file in own if file.endswith((".safetensors", ".packed", ".gguf", ".so", ".pt", ".pth"))]
            torn = [file for file in exact if found[file] not in (expected.get(file), before.get(file))]
            if torn:
                return f"{torn[0]} has {found[torn[0]]} bytes of {expected.get(torn[0])}"
    return ""


class Sweep:
    """The prepared folder, and the process whose forks are the runs."""

    def __init__(self, work: Path) -> None:
        self.root, self.place = work / "root", work / "place"
        env = {"KTC_CACHE_DIR": str(work / "cache"), "OMP_NUM_THREADS": "1", "TMPDIR": str(work / "tmp")}
        (work / "tmp").mkdir(parents=True, exist_ok=True)
        self._work, self._env = work, env
        self._warm: set[str] = set()
        self.forked = Forked(env=env, cwd=work)
        if not self.root.exists():
            self.root.mkdir()
            prepare(self.root, lambda words: self.forked.warm(words).code)

    def run(self, command: Command, error: str, at: int, *, again: bool = False) -> Outcome:
        """Run it from its prepared state, or `again` in the place as it is."""
        if not again:
            command.copy_needs(self.root, self.place)
            if command.cache:
                shutil.rmtree(self._work / "cache" / "kernels", ignore_errors=True)
        folders = (str(self.place), str(self._work / "tmp"), *([str(self._work / "cache")] * command.cache))
        fault = Fault(folders, error, at, error in LASTING)
        return self.forked.run(command.arguments(self.root, self.place), fault)

    def sweep(self, command: Command, kinds: Sequence[str], choose: Callable[[int], Sequence[int]]) -> Row:
        """Try the calls of one command that `choose` returns for their number, each with each kind of fault."""
        row = Row(command.name)
        command.copy_needs(self.root, self.place)
        before = sizes(self.place, command.made)
        if command.name not in self._warm:
            self._warm.add(command.name)
            self.forked.warm(command.arguments(self.root, self.place))
        for kind in kinds:
            counted = self.run(command, kind, 0)
            if counted.code != 0:
                row.broken.append(f"without a fault it ends with {counted.code}: {counted.err[-300:]}")
                return row
            expected = sizes(self.place, command.made)
            row.calls = max(row.calls, counted.calls)
            for at in choose(counted.calls):
                outcome = self.run(command, kind, at)
                row.ended[ending(kind, outcome)] += 1
                for fault in self.faults(command, kind, outcome, expected, before):
                    row.broken.append(f"{kind} at {at} ({outcome.where}): {fault}")
        return row

    def faults(self, command: Command, kind: str, outcome: Outcome, expected: Sizes, before: Sizes) -> Iterator[str]:
        """Yield the promises that a run broke."""
        names = (*command.made, "run/checkpoint-*")
        said = outcome.err
        if outcome.injected == 0:
            return  # it made fewer calls than before
        if kind != KILL:
            if outcome.code not in (0, 130 if kind in ENDING else 3):
                yield f"exit code {outcome.code}: {said.strip()[-400:]}"
            if "Traceback" in said or "U099" in said:
                yield f"a trace or a bug: {said.strip()[-400:]}"
            if outcome.code not in (0, 130) and len(re.findall(r"^error\[\w+\]", said, re.MULTILINE)) != 1:
                yield f"not one message: {said.strip()[-400:]}"
            left = unfinished(self.place)
            if left and not outcome.where.startswith(("unlink", "rmdir")) and kind not in ("EROFS", "EMFILE", "EIO"):
                yield f"left unfinished: {left}"
        torn = whole(
            sizes(self.place, names), {**expected, **sizes_of_checkpoints(expected)}, before, names, self.place
        )
        if torn:
            yield torn
        if kind == KILL:
            yield from self._after_a_kill(command, expected)

    def _after_a_kill(self, command: Command, expected: Sizes) -> Iterator[str]:
        words = command.arguments(self.root, self.place)
        done = set(sizes(self.place, command.made)) >= set(expected) and bool(expected)
        if command.name == "train" and (self.place / "run").exists():
            resumable = any((self.place / "run").glob("checkpoint-*"))
            words = [*words, "--resume", "auto"] if resumable else [*words, "--force"]
            if not (self.place / "run" / "train.yaml").is_file():
                shutil.rmtree(self.place / "run")
                words = command.arguments(self.root, self.place)
        again = self.forked.run(words, Fault(("/nowhere",), KILL))
        exists = re.search(r"error\[(A609|I142)\]", again.err)
        if again.code != 0 and not (exists and done):
            yield f"the next run ends with {again.code}: {again.err.strip()[-400:]}"
        elif again.code == 0 and (left := unfinished(self.place)):
            yield f"the next run did not sweep {left}"


def sizes_of_checkpoints(expected: Sizes) -> Sizes:
    """Return every checkpoint's files as those of the last one: older ones are gone at the end of a run."""
    last = {name: size for name, size in expected.items() if name.startswith("run/checkpoint-4/")}
    return {name.replace("-4/", f"-{step}/"): size for name, size in last.items() for step in range(1, 5)}


def points(calls: int, most: int | None) -> list[int]:
    """Return the numbers of the calls to try: all, or `most` of them, evenly spread and the same each time."""
    if most is None or calls <= most:
        return list(range(1, calls + 1))
    return sorted({1 + round(index * (calls - 1) / (most - 1)) for index in range(most)})


def drawn(calls: int, number: int, chance: Random) -> list[int]:
    """Return the numbers of this many calls, at random."""
    return [chance.randint(1, calls) for _ in range(number)]


def ending(kind: str, outcome: Outcome) -> str:
    """Return how a run ended, for the table."""
    if outcome.injected == 0:
        return "not reached"
    if outcome.killed:
        return "killed"
    known = {0: "no effect", 3: "refused, exit 3", 130: "interrupted, exit 130"}
    return known.get(outcome.code, f"{kind}: exit {outcome.code}")


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| command | calls | runs | refused, exit 3 | interrupted, 130 | no effect | killed | broken promises |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        names = ("refused, exit 3", "interrupted, exit 130", "no effect", "killed")
        counted = [row.ended[name] for name in names]
        figures = (row.calls, row.ended.total(), *counted, len(row.broken))
        lines.append(f"| `{row.name}` | {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


def main() -> None:
    """Sweep the named commands, print the table, and fail if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="commands of commands.py; default: all")
    parser.add_argument("--most", type=int, help="calls of a command per kind of fault; default: all")
    parser.add_argument("--kinds", nargs="*", default=[*ERRORS, *ENDING, KILL])
    parser.add_argument("--kills", type=int, default=0, help="only SIGKILL, so many times for each command")
    parser.add_argument("--seed", type=int, default=0, help="of the calls that `--kills` draws")
    parser.add_argument("--work", type=Path, help="a folder whose prepared models are kept for the next sweep")
    asked = parser.parse_args()
    kinds = [KILL] if asked.kills else asked.kinds

    def choose(calls: int) -> list[int]:
        return drawn(calls, asked.kills, Random(asked.seed)) if asked.kills else points(calls, asked.most)

    chosen = [each for each in COMMANDS if not asked.names or each.name in asked.names]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sweep-") as work:
        sweep = Sweep(asked.work or Path(work) / "sweep")
        with sweep.forked:
            for command in chosen:
                began = time.monotonic()
                rows.append(sweep.sweep(command, kinds, choose))
                row = rows[-1]
                print(f"{row.name}: {row.calls} calls, {dict(row.ended)}, {time.monotonic() - began:.0f} s", flush=True)
                for broken in row.broken:
                    print(f"  BROKEN {broken}", flush=True)
    print(table(rows))
    sys.exit(any(row.broken for row in rows))


if __name__ == "__main__":
    main()
