"""The files of tests/rules say in their folder's name, or in their first line, what must become of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from places import RULES

from ktc.diagnostics import InputRefused, Span, render
from ktc.foundation import resources
from ktc.language import dsl
from ktc.language.dsl.parser import parse
from ktc.language.dsl.printer import print_module

PASSING = sorted((RULES / "pass").rglob("*.ktr"))
FAILING = sorted((RULES / "fail").glob("*.ktr"))
SHIPPED = sorted(resources.rules().rglob("*.ktr"))


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", PASSING, ids=name)
def test_a_good_program_is_accepted_without_a_warning(path: Path) -> None:
    warnings = dsl.load(path).warnings
    assert not warnings, render(warnings)


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_a_shipped_file_is_accepted_without_a_warning(path: Path) -> None:
    warnings = dsl.load(path).warnings
    assert not warnings, render(warnings)


@pytest.mark.parametrize("path", [*PASSING, *SHIPPED], ids=name)
def test_what_is_printed_parses_to_the_same_tree(path: Path) -> None:
    module = parse(path.read_text(), path.name)
    text = print_module(module)
    assert parse(text, path.name) == module
    assert print_module(parse(text, path.name)) == text, "printing is not stable"
    assert text.count("#") == path.read_text().count("#"), "a comment was lost"


@pytest.mark.parametrize("path", FAILING, ids=name)
def test_a_faulty_program_is_refused_at_the_right_places(path: Path) -> None:
    expectation = path.read_text().splitlines()[0]
    expected = sorted(re.findall(r"E\d{3} \S+?(?=,|$)", expectation))
    assert expectation.startswith("# expect: ")
    assert expected
    with pytest.raises(InputRefused) as refusal:
        dsl.load(path)
    found = sorted(f"{d.code} {place(d.span, path)}" for d in refusal.value.diagnostics)
    assert found == expected, render(refusal.value.diagnostics)


def place(span: Span | None, entry: Path) -> str:
    assert span is not None, "an error of a file has a place"
    position = f"{span.line}:{span.column}"
    folder = str(entry.parent)
    file = span.file[span.file.index("lib/") :] if "lib/" in span.file else ""
    assert span.file.endswith(entry.name) or file, f"{span.file} is not under {folder}"
    return f"{file}:{position}" if file else position


WORDED = ("bare_attributes", "colons", "no_import", "ranges", "slashes")


@pytest.mark.parametrize("program", WORDED)
def test_the_messages_for_habits_of_other_languages_are_fixed(program: str, golden: Callable[[str, str], None]) -> None:
    path = RULES / "fail" / f"{program}.ktr"
    with pytest.raises(InputRefused) as refusal:
        dsl.load(path)
    placeless = (replace(d, span=None) for d in refusal.value.diagnostics)
    golden(f"diagnostics/{program}.txt", render(placeless) + "\n")
