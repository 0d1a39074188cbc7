"""Broken programs: whatever is wrong, the answer is a rule set or a located refusal after little work, never a crash.

The test tries `MUTANTS` programs; `python tests/dsl/test_fuzz.py SECONDS SEED` (`make fuzz`) goes on for a time.
"""

from __future__ import annotations

import math
import random
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from places import RULES
from work import calls

from ktc import dsl, resources
from ktc.diagnostics import InputRefused, render, to_json
from ktc.dsl.parser import parse
from ktc.dsl.printer import print_module

SEED = 20
MUTANTS = 60
MOST_CALLS = 4_000_000  # of one mutant: some 70,000 is usual, 300,000 is much
TOKEN = re.compile(r'\s+|\w+|"[^"\n]*"|[^\w\s]')
EXTRA = (
    *("rule", "match", "at", "{", "}", "(", ")", "=>", "=", "==", "->", "..", "?", "|", ",", "$x", "_", "has", "not"),
    *("9" * 30, "1e999", "22GiB", "cuda:0", '"', "\\", "#", "\n", "\x00", "\u00e9", "m.a.b.c", "auto", "[1..]", "%"),
    *("-", "**", "{a,b}", "[3..60]", "*", "overrides", "except", "0", "in", "import", "pattern", "require", "param"),
)
FOLDERS = (resources.rules(), RULES / "pass", RULES / "fail")
ORIGINALS = [path.read_text() for folder in FOLDERS for path in sorted(folder.rglob("*.ktr"))]


def mutate(text: str, chance: random.Random) -> str:
    tokens = TOKEN.findall(text) or [" "]
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(tokens))
        match chance.randrange(6):
            case 0:
                del tokens[place : place + chance.choice((1, 1, 3, 20))]
            case 1:
                tokens.insert(place, chance.choice(EXTRA))
            case 2:
                tokens[place] = chance.choice(tokens)
            case 3:
                tokens[place] = chance.choice(EXTRA)
            case 4:
                tokens[place:place] = tokens[place : place + 30]
            case _:
                tokens += TOKEN.findall(chance.choice(ORIGINALS))
        tokens = tokens or [" "]
    return "".join(tokens)


def check_mutant(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    calls(lambda: check_answer(path), most=MOST_CALLS)


def check_answer(path: Path) -> None:
    try:
        ruleset = dsl.load(path)
    except InputRefused as error:
        check_refusal(error)
    else:
        module = ruleset.units[0].module
        assert parse(print_module(module), module.file) == module


def check_refusal(error: InputRefused) -> None:
    for diagnostic in error.diagnostics:
        assert diagnostic.span is not None, f"{diagnostic} has no place"
        lines = error.sources[diagnostic.span.file].split("\n")
        assert 1 <= diagnostic.span.line <= len(lines)
        assert 1 <= diagnostic.span.column <= len(lines[diagnostic.span.line - 1]) + 1
        assert to_json(diagnostic, error.sources)
    assert render(error.diagnostics, error.sources)


def run(seconds: float, most: int, seed: int) -> int:
    """Checks mutants until the time or the number is used up, and says how many there were."""
    chance = random.Random(seed)
    stop = time.perf_counter() + seconds
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lib").mkdir()
        for library in (*(RULES / "pass" / "lib").iterdir(), *(RULES / "fail" / "lib").iterdir()):
            (folder / "lib" / library.name).write_text(library.read_text())
        for count in range(most):
            if time.perf_counter() > stop:
                return count
            text = mutate(chance.choice(ORIGINALS), chance)
            try:
                check_mutant(folder / "mutant.ktr", text)
            except Exception:
                print(f"mutant {count} of seed {seed}:\n{text}")
                raise
    return most


def test_mutated_programs_never_crash() -> None:
    assert run(math.inf, MUTANTS, SEED) == MUTANTS


if __name__ == "__main__":
    wanted, given = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    print(f"{run(wanted, sys.maxsize, given)} mutants of seed {given}, no fault")
