"""What is written of the language is true: its reference with examples and tables, and the grammar for editors."""

from __future__ import annotations

import json
import plistlib
import re
from pathlib import Path

import pytest
from places import ROOT
from reference_pages import targets_page

from ktc.diagnostics import InputRefused, render
from ktc.language import dsl
from ktc.language.dsl import schema, textmate, vim_syntax
from ktc.language.dsl.formatter import format_text

PAGES = (ROOT / "docs" / "reference" / "language.md", *sorted((ROOT / "docs").glob("[dg]*/*.md")))
_EXAMPLE = re.compile(r"^```ktr(?: error=(\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [example for page in PAGES for example in _EXAMPLE.findall(page.read_text())]
GRAMMAR = ROOT / "editors" / "ktr.tmLanguage.json"


@pytest.mark.parametrize(("code", "text"), EXAMPLES)
def test_the_examples_of_the_reference_do_what_they_say(code: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.ktr"
    path.write_text(text)
    if not code:
        warnings = dsl.load(path).warnings
        assert not [w for w in warnings if w.code != "W050"], render(warnings)
        assert format_text(format_text(text, "a"), "a") == format_text(text, "a")
        return
    with pytest.raises(InputRefused) as refusal:
        dsl.load(path)
    assert [d.code for d in refusal.value.diagnostics] == [code], render(refusal.value.diagnostics)


def test_the_reference_has_both_kinds_of_examples() -> None:
    assert sum(not code for code, _ in EXAMPLES) >= 7
    assert sum(bool(code) for code, _ in EXAMPLES) >= 8


def test_the_reference_names_everything_that_programs_can() -> None:
    words = set(re.findall(r"[A-Za-z_0-9]+", PAGES[0].read_text() + targets_page()))
    settings = {name for specs in schema.SETTINGS.values() for name in specs}
    roles = {name for role in schema.ROLES.values() for table in (role.members, role.optional) for name in table}
    facts = {name for topic in schema.FACTS.values() for name in topic}
    keys = {name for block in schema.BLOCKS.values() for name in block}
    constants = {name for names in schema.ENUMS.values() for name in names}
    tables = (schema.SETTINGS, schema.OPERATORS, schema.ROLES, schema.ENUMS, schema.KEYWORDS, schema.CAPTURE_ATTRIBUTES)
    named = settings | roles | facts | keys | constants | {name for table in tables for name in table}
    assert not named - words


def test_the_grammar_for_editors_is_up_to_date() -> None:
    command = "python -m ktc.language.dsl.textmate editors/ktr.tmLanguage.json"
    assert GRAMMAR.read_text() == textmate.grammar(), f"run `{command}`"


def test_the_syntax_for_vim_is_up_to_date_and_knows_every_keyword_once() -> None:
    command = "python -m ktc.language.dsl.vim_syntax editors/vim/syntax/ktr.vim"
    text = (GRAMMAR.parent / "vim" / "syntax" / "ktr.vim").read_text()
    assert text == vim_syntax.syntax(), f"run `{command}`"
    words = [word for line in re.findall(r"^syntax keyword \w+ (.*)$", text, re.MULTILINE) for word in line.split()]
    assert sorted(words) == sorted(schema.KEYWORDS)


def test_the_extension_for_editors_names_files_that_exist() -> None:
    contributes = json.loads((GRAMMAR.parent / "package.json").read_text())["contributes"]
    named = [contributes["languages"][0]["configuration"], contributes["grammars"][0]["path"]]
    assert all(json.loads((GRAMMAR.parent / name).read_text()) for name in named)
    assert contributes["grammars"][0]["scopeName"] == json.loads(GRAMMAR.read_text())["scopeName"]
    assert plistlib.dumps(json.loads(GRAMMAR.read_text())), "Sublime Text reads it as a property list"


def test_the_grammar_for_editors_knows_every_constant() -> None:
    rows = json.loads(GRAMMAR.read_text())["patterns"]
    (expression,) = (row["match"] for row in rows if row.get("name") == "support.constant.ktr")
    constants = {word for words in schema.ENUMS.values() for word in words} - schema.KEYWORDS - schema.OPERATORS.keys()
    assert not [word for word in constants if re.fullmatch(expression, word) is None]


def test_the_grammar_for_editors_knows_every_keyword_once() -> None:
    rows = json.loads(GRAMMAR.read_text())["patterns"]
    words = [row["match"] for row in rows if row.get("name", "").startswith(("keyword.", "constant.language"))]
    for keyword in schema.KEYWORDS:
        assert sum(re.fullmatch(expression, keyword) is not None for expression in words) == 1, keyword
    assert all(re.compile(row["match"]) for row in rows)
