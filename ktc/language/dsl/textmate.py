"""A TextMate grammar of the rule language, generated from the keywords and constants of the schema.

`python -m ktc.language.dsl.textmate FILE` writes it; `editors/ktr.tmLanguage.json` is that file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from ktc.language.dsl.schema import DECLARATIONS, DEVICE_FAMILIES, ENUMS, KEYWORDS, OPERATORS
from ktc.model.targets import TARGETS

WORDS_OF_LOGIC = ("and", "or", "not", "in", "has")
TRUTH = ("true", "false")
# The shape of the names of formats and dtypes, so that a new format needs no new grammar.
_NUMBERS = "(?:bf|f|fp|u?int|i?q|mxfp|nvfp|tq)[0-9]+(?:_[a-z0-9]+)?"


def grammar() -> str:
    words = {word for words in ENUMS.values() for word in words} - KEYWORDS - OPERATORS.keys()
    constants = {word for word in words if not re.fullmatch(_NUMBERS, word)}
    clauses = KEYWORDS - {*DECLARATIONS, *WORDS_OF_LOGIC, *TRUTH}
    patterns = [
        _match("comment.line.number-sign.ktr", "#.*$"),
        {
            **_match("string.quoted.double.ktr", r'"(?:\\["\\]|[^"\\\n])*"'),
            "captures": {"0": {"patterns": [_match("constant.character.escape.ktr", r'\\["\\]')]}},
        },
        _named("(pattern|rule|param)", "entity.name.function.ktr"),
        _match("variable.parameter.ktr", r"\$[A-Za-z_][A-Za-z0-9_]*"),
        _match("constant.other.device.ktr", rf"\b(?:{_any(DEVICE_FAMILIES)}):[0-9]+"),
        _match("constant.numeric.ktr", r"\b[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?: ?[KMGT]?i?B)?\b"),
        _match("keyword.declaration.ktr", _word(DECLARATIONS)),
        _match("keyword.operator.word.ktr", _word(WORDS_OF_LOGIC)),
        _match("keyword.control.ktr", _word(clauses)),
        _match("constant.language.boolean.ktr", _word(TRUTH)),
        _match("support.function.target.ktr", rf"(?<==>)\s*{_word(TARGETS)}"),
        _match("support.function.operator.ktr", rf"{_word(OPERATORS)}(?=\s*\()"),
        _match("support.constant.ktr", rf"(?<!\.){_word((*constants, _NUMBERS))}"),
        _match("keyword.operator.ktr", r"->|=>|\.\.|[=!<>]=|[=<>+*/%|?-]"),
    ]
    whole = {"name": "ktr", "scopeName": "source.ktr", "fileTypes": ["ktr"], "patterns": patterns}
    return json.dumps(whole, indent=2) + "\n"


def _match(name: str, expression: str) -> dict[str, object]:
    return {"name": name, "match": expression}


def _named(keywords: str, name: str) -> dict[str, object]:
    """Return the patterns of a keyword and the name that it declares."""
    captures = {"1": {"name": "keyword.declaration.ktr"}, "2": {"name": name}}
    return {"match": rf"\b{keywords}\s+([A-Za-z_][A-Za-z0-9_]*)", "captures": captures}


def _word(words: Iterable[str]) -> str:
    return rf"\b(?:{_any(words)})\b"


def _any(words: Iterable[str]) -> str:
    return "|".join(sorted(words))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(grammar(), encoding="utf-8")
