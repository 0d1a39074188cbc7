"""A syntax file of the rule language for Vim and Neovim, from the same words as the TextMate grammar.

`python -m ktc.language.dsl.vim_syntax FILE` writes it; `editors/vim/syntax/ktr.vim` is that file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ktc.language.dsl.schema import DECLARATIONS, DEVICE_FAMILIES, ENUMS, KEYWORDS, OPERATORS
from ktc.language.dsl.textmate import TRUTH, WORDS_OF_LOGIC
from ktc.model.targets import TARGETS

_GROUPS: Final[Mapping[str, str]] = {
    "Declaration": "Statement", "Control": "Keyword", "Logic": "Operator", "Boolean": "Boolean", "Constant": "Constant",
    "Comment": "Comment", "String": "String", "Variable": "Identifier", "Device": "Constant", "Number": "Number",
    "Target": "Function", "Call": "Function",
}  # fmt: skip


def syntax() -> str:
    """Return the file as text."""
    constants = {word for words in ENUMS.values() for word in words} - KEYWORDS - OPERATORS.keys()
    lines = [
        '" Vim syntax of ktc rule files. Made by `python -m ktc.language.dsl.vim_syntax`: do not edit.',
        'if exists("b:current_syntax") | finish | endif',
        "syntax case match",
        _keywords("Declaration", DECLARATIONS),
        _keywords("Control", KEYWORDS - {*DECLARATIONS, *WORDS_OF_LOGIC, *TRUTH}),
        _keywords("Logic", WORDS_OF_LOGIC),
        _keywords("Boolean", TRUTH),
        _match("Constant", rf"\.\@<!\<\%({_any(constants)}\)\>"),
        # Of two matches at one place, Vim takes the later one.
        _match("Target", rf"\%(=>\s*\)\@<=\<\%({_any(TARGETS)}\)\>"),
        _match("Call", rf"\<\%({_any(OPERATORS)}\)\>\ze\s*("),
        _match("Device", rf"\<\%({_any(DEVICE_FAMILIES)}\):\d\+"),
        _match("Number", r"\<\d\+\%(\.\d\+\)\?\%([eE][+-]\?\d\+\)\?\%( \?[KMGT]\?i\?B\)\?\>"),
        _match("Variable", r"\$[A-Za-z_]\w*"),
        r'syntax region ktrString start=+"+ skip=+\\["\\]+ end=+"+ oneline',
        _match("Comment", "#.*$"),
        *(f"highlight default link ktr{name} {group}" for name, group in _GROUPS.items()),
        'let b:current_syntax = "ktr"',
    ]
    return "\n".join(lines) + "\n"


def _keywords(name: str, words: Iterable[str]) -> str:
    return f"syntax keyword ktr{name} {' '.join(sorted(words))}"


def _match(name: str, expression: str) -> str:
    return f"syntax match ktr{name} +{expression}+"


def _any(words: Iterable[str]) -> str:
    return r"\|".join(sorted(words, reverse=True))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(syntax(), encoding="utf-8")
