"""Run the mutants of values between stages and print the table: what notices each, or why it changes no result.

    python -m mutants [-o tests/mutants/table.md] [PATTERN ...]     (with tests and tests/support on the path)

A pattern is a part of a model, a kind or a name. The program exits 1 if a mutant that changes a result survives, or
one that is called equivalent is noticed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hand_made
import torch

import ktc
from ktc.model import twin
from ktc.stages.link import link
from mutants import MUTANTS
from mutants.mutant import Mutant, Verdict, verdict
from mutants.weights import weights_verdict


@dataclass(frozen=True, slots=True)
class Row:
    """A mutant, and what noticed it."""

    mutant: Mutant
    found: Verdict

    @property
    def wrong(self) -> bool:
        """Whether the verdict is not the expected one."""
        return bool(self.found.by) == bool(self.mutant.equivalent)

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.found.by:
            words = " ".join(self.found.told.split()).replace("|", "\\|")
            told = f"{self.found.by}: {words[:160]}"
            return f"**not equivalent**: {told}" if self.mutant.equivalent else told
        reason = self.mutant.equivalent
        return (reason if reason.startswith("not proven") else f"equivalent: {reason}") if reason else "**survived**"


def run(mutants: Sequence[Mutant]) -> Iterator[Row]:
    """Run mutants, those of one model after another."""
    of_stages = sorted((m for m in mutants if m.kind != "weights"), key=lambda m: m.model)
    yield from (Row(mutant, verdict(mutant)) for mutant in of_stages)
    of_weights = [m for m in mutants if m.kind == "weights"]
    if of_weights:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = twin.write("deepseek_v2", Path(folder))
            clean = link(hand_made.package(checkpoint, hand_made.scalar_kernel()), Path(folder) / "clean_twin")
            ktc.pack(clean)
            for mutant in of_weights:
                with tempfile.TemporaryDirectory() as copied:
                    yield Row(mutant, weights_verdict(mutant, clean, Path(copied)))


def table(rows: Sequence[Row], seconds: float) -> str:
    """Return the rows as Markdown."""
    wrong = sum(row.wrong for row in rows)
    equivalent = sum(bool(row.mutant.equivalent) for row in rows)
    by = {name: sum(row.found.by == name for row in rows) for name in ("proof", "prove", "stage")}
    head = f"""# Mutants of what runs

Written by `make mutants`. Each row changes one value between two stages, or a module or weight that
the loader makes. It has to be noticed before a wrong model runs.

{len(rows)} mutants of {len({row.mutant.model for row in rows})} models in {seconds:.0f} s. The proof refutes \
{by["proof"]}, `ktc prove` is red for {by["prove"]},
a stage refuses {by["stage"]}. {equivalent} need not be noticed. {wrong} have another verdict than expected.

| no | kind | model | mutant | noticed by |
| --- | --- | --- | --- | --- |"""
    lines = [head]
    for number, row in enumerate(rows, 1):
        lines.append(f"| {number} | {row.mutant.kind} | {row.mutant.model} | {row.mutant.name} | {row.text} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the chosen mutants. Returns 1 if one has another verdict than expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="which mutants; default: all")
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    chosen = [
        m
        for m in MUTANTS
        if not given.patterns or any(part in (m.model, m.kind) or part in m.name for part in given.patterns)
    ]
    torch.set_num_threads(1)
    started, rows = time.monotonic(), list[Row]()
    for row in run(chosen):
        rows.append(row)
        print(f"{row.mutant.kind} {row.mutant.model}: {row.mutant.name} | {row.text}", flush=True)
    text = table(rows, time.monotonic() - started)
    if given.output is not None:
        given.output.write_text(text, encoding="utf-8")
    wrong = [row for row in rows if row.wrong]
    print(f"{len(rows)} mutants, {len(wrong)} with another verdict than expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
