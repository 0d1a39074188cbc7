"""Hooks of mkdocs: the reference pages are made from the code while the site is built.

Pages also say on the site what the words after a block's language say in their source, and a code in brackets leads to
its explanation.
"""

from __future__ import annotations

import re
from typing import Any, Final

from mkdocs.structure.files import File
from reference_pages import pages

from ktc.language.explain import explanations

_LABEL = re.compile(r"^```(\w+) (needs=gpu|needs=download|part|printed|by=\S+|error=\w+)$", re.MULTILINE)
_WORDS: Final = {
    "needs=gpu": "not run by the tests: needs a GPU or another program",
    "needs=download": "not run by the tests: needs a download",
    "part": "a part of a program",
}
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_CODES = re.compile(r"\((?:[A-Z]\d{3}(?:, | to | and )?)+\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the generated pages to the files of the site."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Title the labelled blocks, and link the codes of messages outside of blocks."""
    titled = _LABEL.sub(_title, markdown)
    if page.file.src_uri.startswith("reference/diagnostics"):
        return titled
    up = "../" * page.file.src_uri.count("/")
    parts = _FENCED.split(titled)
    return "".join(part if part.startswith("```") else _linked(part, up) for part in parts)


def _title(block: re.Match[str]) -> str:
    language, word = block[1], block[2]
    if word == "printed":
        return f"```{language}"
    kind, _, value = word.partition("=")
    words = {"error": f"refused with {value}", "by": f"run by {value}"}.get(kind) or _WORDS[word]
    return f'```{language} title="{words}"'


def _linked(text: str, up: str) -> str:
    return _CODES.sub(lambda codes: re.sub(r"[A-Z]\d{3}", lambda code: _link(code[0], up), codes[0]), text)


def _link(code: str, up: str) -> str:
    return f"[{code}]({up}reference/diagnostics.md#{code.lower()})" if code in explanations() else code
