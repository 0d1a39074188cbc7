"""Comments, and the empty lines around them, in canonical text.

Input: the printed lines, each with its source line, and the comments. Output: the lines of the text. A comment stays
at the end of the same line or before the same line.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ktc.language.dsl.syntax import Comment

_COLUMN = 50  # column of trailing comments, if the line is shorter


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    source: int  # source line, 0 if none


def with_comments(lines: Sequence[Line], comments: Iterable[Comment]) -> list[str]:
    texts: list[str] = []
    ends = _ends(lines)
    waiting = deque(sorted(comments, key=lambda comment: comment.span.line))
    for index, line in enumerate(lines):
        if line.source:
            texts += _before(line, waiting)
        text = line.text
        while ends.get(line.source) == index and waiting and waiting[0].span.line == line.source:
            text = f"{text}  {_text(waiting.popleft())}" if "#" in text else _behind(text, waiting.popleft())
        texts.append(text)
    last = max((line.source for line in lines), default=0)
    for comment in waiting:
        if texts and comment.span.line > last + 1:
            texts.append("")
        texts.append(_text(comment))
        last = comment.span.line
    return texts


def _ends(lines: Sequence[Line]) -> dict[int, int]:
    """Map each source line to the printed line that ends it; for a whole declaration, to the line that begins it."""
    places: dict[int, list[int]] = defaultdict(list)
    for index, line in enumerate(lines):
        places[line.source].append(index)
    return {source: at[0] if lines[at[-1]].text == "}" else at[-1] for source, at in places.items()}


def _before(line: Line, waiting: deque[Comment]) -> list[str]:
    """Return the comments before a line, and at top level the empty lines below them."""
    texts: list[str] = []
    indentation = " " * (len(line.text) - len(line.text.lstrip())) if line.text != "}" else "  "
    while waiting and waiting[0].span.line < line.source:
        comment = waiting.popleft()
        texts.append(indentation + _text(comment))
        following = min(waiting[0].span.line, line.source) if waiting else line.source
        if not indentation and following > comment.span.line + 1:
            texts.append("")
    return texts


def _behind(text: str, comment: Comment) -> str:
    return f"{text:<{_COLUMN}}{_text(comment)}" if len(text) <= _COLUMN - 2 else f"{text}  {_text(comment)}"


def _text(comment: Comment) -> str:
    return comment.text.rstrip()
