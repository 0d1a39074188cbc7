"""The pages of Markdown of the repository, and their fenced blocks, headings and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from places import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
GUIDE = sorted((DOCS / "guide").glob("*.md"))
PAGES = sorted((README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md")))
# A block that runs nowhere in the tests: it needs a GPU or a download, or is a part of a program.
EXEMPT = {"needs=gpu", "needs=download", "part"}
PRINTED = "printed"  # of a block of text: part of what the page's commands print
_BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+?)(?: \{ #([\w-]+) \})?$", re.MULTILINE)
_ANCHOR = re.compile(r'<a id="([\w-]+)">')
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page; `words` are those after its language."""

    page: Path
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Its commands as words, without comments and here-documents; continued lines are joined."""
        plain = re.sub(r"<<'(\w+)'\n.*?^\1$", "", self.text, flags=re.MULTILINE | re.DOTALL)
        joined = plain.replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]

    @property
    def runs_here(self) -> bool:
        return not any(word in EXEMPT or word.startswith("by=") for word in self.words)


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of a page, of these languages or of any."""
    read = [
        Block(page, *_labelled(block["info"]), block["text"])
        for block in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]
    return [block for block in read if not languages or block.language in languages]


def _labelled(info: str) -> tuple[str, tuple[str, ...]]:
    language, *words = info.split() or [""]
    return language, tuple(words)


def title(page: Path) -> str:
    """Return the name of a page for a test."""
    return page.relative_to(ROOT).with_suffix("").as_posix()


def anchors(text: str) -> set[str]:
    """Return the anchors of a page that GitHub and the site make alike."""
    plain = _BLOCK.sub("", text)
    made = set(_ANCHOR.findall(plain))
    for heading, given in _HEADING.findall(plain):
        words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        on_github, on_site = words.replace(" ", "-"), re.sub(r"[-\s]+", "-", words)
        made |= {given} if given else {on_site} if on_site == on_github else set()
    return made


def links(text: str) -> Iterator[str]:
    """Yield the targets of links and pictures, without those in code and those to other hosts."""
    for target in _LINK.findall(_CODE.sub("", _BLOCK.sub("", text))):
        if not re.match(r"[a-z]+:", target):
            yield target


def tables(text: str) -> Iterator[list[str]]:
    """Yield the rows of each table, its head first."""
    for table in re.findall(r"(?:^\|.*\n?)+", _BLOCK.sub("", text), re.MULTILINE):
        yield table.splitlines()
