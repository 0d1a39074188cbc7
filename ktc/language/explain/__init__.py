"""Explanations of all diagnostic codes, each with a bad and a good example, from the Markdown files in this folder.

Input: a code of any stage. Output: its explanation. Codes with the same remedy share one section, whose heading lists
them: `## H226 H229 Title`. Refused: an unknown code.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ktc.diagnostics import Diagnostic, InputRefused, suggest

_TEXTS = Path(__file__).parent
_WIDTH = 100
_SECTION = re.compile(r"^## ((?:[A-Z]\d{3} )+)(.+)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^```(\w+) (bad|good)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The section of a code. `language` is that of the examples: `ktr` for rule programs, `sh`, `toml`, `text`, ..."""

    code: str
    title: str
    text: str
    language: str
    bad: str
    good: str

    def __str__(self) -> str:
        examples = "\n\n".join(
            f"{label}:\n{_indented(example)}" for label, example in (("Bad", self.bad), ("Good", self.good))
        )
        return f"{self.code}: {self.title}\n\n{self.text}\n\n{examples}"


@cache
def explanations() -> dict[str, Explanation]:
    """Return every code with its explanation, in the order of the texts."""
    explained: dict[str, Explanation] = {}
    for path in sorted(_TEXTS.glob("*.md")):
        content = path.read_text(encoding="utf-8")
        heads = [*_SECTION.finditer(content)]
        ends = [*(head.start() for head in heads[1:]), len(content)]
        for head, end in zip(heads, ends, strict=True):
            for code in head[1].split():
                assert code not in explained, f"{code} is explained twice"
                explained[code] = _read(code, head[2], content[head.end() : end])
    return explained


def explain(code: str) -> Explanation:
    """Return the explanation of a code, in any case. Raises InputRefused (U020)."""
    known = explanations()
    if code.upper() in known:
        return known[code.upper()]
    hint = suggest(code.upper(), known) or "codes are in brackets after `error` and `warning`, for example `E042`"
    raise InputRefused(Diagnostic("U020", f"there is no code `{code}`", hint=hint))


def _read(code: str, title: str, section: str) -> Explanation:
    examples = {kind: (language, text) for language, kind, text in _EXAMPLE.findall(section)}
    assert examples.keys() == {"bad", "good"}, f"{code} needs a bad and a good example"
    text = textwrap.fill(section[: section.index("\n```")].strip(), _WIDTH)
    return Explanation(code, title, text, examples["bad"][0], examples["bad"][1], examples["good"][1])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())
