"""Mutate every kind of input for a time, and print the table: how many were refused by which codes, and what failed.

    python -m fuzz [SECONDS] [--kinds "gguf configs"] [--seed N] [-n N] [-o FILE] [--json]

(with tests and tests/support on the path). Each of N processes runs all kinds, each for a share of the time. The
corpus is in build/fuzz and grows from run to run. Faults are written to build/fuzz/faults; with one the program exits
1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from places import ROOT

from fuzz.fuzzing import Kind, Tally, run
from fuzz.kinds import KINDS

CORPUS = ROOT / "build" / "fuzz"
GRACE = 300.0  # seconds without an end of a mutant, after which a process ends with a trace of all threads


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("seconds", nargs="?", type=float, default=600.0)
    parser.add_argument("--kinds", default="", help="names of kinds; all by default")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("-n", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("-o", type=Path, default=None, help="write the table as JSON too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.kinds.split()
    if unknown := sorted(set(names) - {kind.name for kind in KINDS}):
        parser.error(f"there is no kind {unknown[0]}; there are {' '.join(kind.name for kind in KINDS)}")
    chosen = [kind for kind in KINDS if not names or kind.name in names]
    seed = time.time_ns() & 0xFFFFFFFF if asked.seed is None else asked.seed
    if asked.worker:
        return _work(chosen, asked.seconds, seed)
    tallies = _share(chosen, asked.seconds, seed, asked.n)
    report = {"seed": seed, "processes": asked.n, "kinds": [asdict(each) for each in tallies.values()]}
    text = json.dumps(report, indent=1)
    if asked.o is not None:
        asked.o.write_text(text + "\n", encoding="utf-8")
    print(text if asked.json else _table(list(tallies.values()), seed))
    return 1 if any(each.faults for each in tallies.values()) else 0


def _work(kinds: Sequence[Kind], seconds: float, seed: int) -> int:
    """Run all kinds in this process and print a tally a line."""
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print do not disturb the tallies
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="fuzz-") as name:
        for kind in kinds:
            share = seconds / len(kinds)
            faulthandler.dump_traceback_later(share + GRACE, exit=True)
            print(f"# {kind.name} {name}", file=out, flush=True)
            tally = run(kind, Path(name) / kind.name, CORPUS / kind.name, Random(seed), seconds=share, most=sys.maxsize)
            print(json.dumps(asdict(tally)), file=out, flush=True)
            faulthandler.cancel_dump_traceback_later()
            _keep_faults(Path(name) / "faults")
    return 0


def _keep_faults(found: Path) -> None:
    if found.is_dir():
        (CORPUS / "faults").mkdir(parents=True, exist_ok=True)
        for path in found.iterdir():
            (CORPUS / "faults" / path.name).write_bytes(path.read_bytes())


def _share(kinds: Sequence[Kind], seconds: float, seed: int, processes: int) -> Mapping[str, Tally]:
    names = " ".join(kind.name for kind in kinds)
    command = [sys.executable, "-m", "fuzz", str(seconds), "--worker", "--kinds", names, "--seed"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    CORPUS.mkdir(parents=True, exist_ok=True)
    tallies = {kind.name: Tally(kind.name) for kind in kinds}
    with tempfile.TemporaryDirectory() as logs:
        running: list[tuple[subprocess.Popen[str], Path]] = []
        for number in range(processes):
            log = Path(logs) / str(number)
            with log.open("w", encoding="utf-8") as errors:
                one = [*command, str(seed + number)]
                running.append(
                    (subprocess.Popen(one, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment), log)
                )
        for process, log in running:
            _gather(process, log, tallies)
    return tallies


def _gather(process: subprocess.Popen[str], log: Path, tallies: Mapping[str, Tally]) -> None:
    """Add the tallies of a process. One that died leaves its folder, with the mutant that it was reading."""
    assert process.stdout is not None
    begun = ""
    for line in process.stdout:
        if line.startswith("# "):
            begun = line[2:].strip()
            continue
        found: dict[str, Any] = json.loads(line)
        tallies[found["kind"]].add(found)
    if process.wait() != 0:
        kind, _, folder = begun.partition(" ")
        last = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        tallies[kind].faults[folder] = f"the process ended with {process.returncode}: {last}"
        tallies[kind].traces += 1


def _table(tallies: Sequence[Tally], seed: int) -> str:
    rows = [("kind", "mutants", "a second", "accepted", "refused", "codes", "traces", "hangs", "slowest", "corpus")]
    for each in tallies:
        codes = " ".join(code for code, _ in sorted(each.refused.items(), key=lambda row: -row[1])[:5])
        refused = sum(each.refused.values())
        speed = each.mutants / each.seconds if each.seconds else 0.0
        rows.append(
            (each.kind, f"{each.mutants:,}", f"{speed:,.0f}", f"{each.accepted:,}", f"{refused:,}", codes,
             str(each.traces), str(each.hangs), f"{each.slowest:.2f} s", str(each.kept))
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{name}: {reason}" for each in tallies for name, reason in each.faults.items()]
    return "\n".join((*lines, f"seed {seed}"))


if __name__ == "__main__":
    sys.exit(main())
