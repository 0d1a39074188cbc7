"""Mutated programs: whatever is broken, the answer is a located refusal or a rule set, never a crash."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

from ktc import dsl, resources
from ktc.diagnostics import InputRefused, render
from ktc.dsl.parser import parse
from ktc.dsl.printer import print_module

SEED = 20
SECONDS = 2.0
MOST = 400  # mutants; a slow machine stops earlier, by the clock
TOKEN = re.compile(r'\s+|\w+|"[^"\n]*"|[^\w\s]')
EXTRA = (
    *(
        "rule",
        "match",
        "at",
        "{",
        "}",
        "(",
        ")",
        "=>",
        "=",
        "==",
        "->",
        "..",
        "?",
        "|",
        ",",
        "$x",
        "_",
        "has",
        "not",
        "in",
    ),
    *(
        "9" * 30,
        "1e999",
        "22GiB",
        "cuda:0",
        '"',
        "\\",
        "#",
        "\n",
        "\x00",
        "\u00e9",
        "m.a.b.c",
        "auto",
        "[1..]",
        "%",
        "-",
    ),
)


def mutate(text: str, random_: random.Random) -> str:
    tokens = TOKEN.findall(text)
    for _ in range(random_.choice((1, 1, 2, 5))):
        place = random_.randrange(len(tokens))
        match random_.randrange(5):
            case 0:
                del tokens[place : place + random_.choice((1, 1, 3, 20))]
            case 1:
                tokens.insert(place, random_.choice(EXTRA))
            case 2:
                tokens[place] = random_.choice(tokens)
            case 3:
                tokens[place] = random_.choice(EXTRA)
            case _:
                tokens[place:place] = tokens[place : place + 30]
        tokens = tokens or [" "]
    return "".join(tokens)


def check_mutant(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    try:
        ruleset = dsl.load(path)
    except InputRefused as error:
        check_refusal(error)
        return
    module = ruleset.units[0].module
    assert parse(print_module(module), module.file) == module


def check_refusal(error: InputRefused) -> None:
    for diagnostic in error.diagnostics:
        assert diagnostic.span is not None, f"{diagnostic} has no place"
        lines = error.sources[diagnostic.span.file].split("\n")
        assert 1 <= diagnostic.span.line <= len(lines)
        assert 1 <= diagnostic.span.column <= len(lines[diagnostic.span.line - 1]) + 1
    assert render(error.diagnostics, error.sources)


def test_mutated_programs_never_crash(tmp_path: Path) -> None:
    random_ = random.Random(SEED)
    folder = Path(__file__).parent / "rules" / "pass"
    originals = [path.read_text() for path in (*resources.rules().rglob("*.ktr"), folder / "program.ktr")]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "first_layers.ktr").write_text((folder / "lib" / "first_layers.ktr").read_text())
    started = time.perf_counter()
    for count in range(MOST):
        if time.perf_counter() - started > SECONDS:
            assert count > 20, "too slow to say anything"
            return
        text = mutate(random_.choice(originals), random_)
        print(f"mutant {count} of seed {SEED}:\n{text}")  # pytest shows the last one if the check fails
        check_mutant(tmp_path / "mutant.ktr", text)
