"""Every code that ktc can print is explained, and the examples of rule codes do what they are examples of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ktc
from ktc.diagnostics import InputRefused, render
from ktc.language import dsl
from ktc.language.explain import Explanation, explain, explanations

RULE_CODES = [e for e in explanations().values() if e.language == "ktr"]


def codes(folder: Path, text: str) -> dict[str, str]:
    """The codes that a program brings, with their messages. Its first line may say `# --set NAME=VALUE`."""
    path = folder / "example.ktr"
    path.write_text(text)
    settings = dict(re.findall(r"^# --set (\w+)=(\w+)$", text.splitlines()[0]))
    try:
        found = dsl.load(path, settings).warnings
    except InputRefused as error:
        found = error.diagnostics
    return {diagnostic.code: render([diagnostic]) for diagnostic in found}


def test_every_code_is_explained_and_every_explanation_has_a_code() -> None:
    root = Path(ktc.__file__).parent
    texts = [path.read_text() for place in (root, root.parent / "benchmarks") for path in place.rglob("*.py")]
    used = {code for text in texts for code in re.findall(r'"([A-Z]\d{3})"', text)}
    missing = used - explanations().keys()
    assert not missing, f"write a section for {sorted(missing)} in ktc/language/explain"
    assert explanations().keys() == used, "codes that nothing prints need no explanation"


@pytest.mark.parametrize("explanation", RULE_CODES, ids=lambda e: e.code)
def test_the_bad_example_brings_its_code_and_the_good_one_nothing(explanation: Explanation, tmp_path: Path) -> None:
    assert explanation.code in codes(tmp_path, explanation.bad)
    assert codes(tmp_path, explanation.good) == {}


def test_codes_of_rule_programs_are_explained_by_rule_programs() -> None:
    assert {e.code for e in RULE_CODES} == {code for code in explanations() if code[0] in "EW"}


def test_an_explanation_reads_as_a_page() -> None:
    page = str(explain("e042"))
    assert page.startswith("E042: rewrite of an absorbed capture\n\nSome rewrites absorb")
    assert "Bad:\n    import" in page
    assert "Good:\n    import" in page
    assert all(len(line) <= 130 for e in explanations().values() for line in str(e).splitlines())


def test_codes_with_the_same_remedy_share_a_section() -> None:
    no_python, no_compiler = explain("H222"), explain("H221")
    assert no_python.code == "H222"
    assert (no_python.title, no_python.text, no_python.bad) == (no_compiler.title, no_compiler.text, no_compiler.bad)


def test_an_unknown_code_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputRefused) as refusal:
        explain("E0042")
    assert refusal.value.diagnostics[0].code == "U020"
    assert "did you mean `E0" in refusal.value.diagnostics[0].hint
