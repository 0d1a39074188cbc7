"""The text of a rule file below the grammar: comments, bracket nesting, and the starts of declarations.

It provides what the grammar cannot: comments for the formatter, excessive nesting (refused before parsing), the
innermost unclosed `{`, and the line at which parsing resumes after an error.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ktc.diagnostics import Span
from ktc.language.dsl.schema import DECLARATIONS
from ktc.language.dsl.syntax import Comment

_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*|[(\[{]|[)\]}]')
_WORDS = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*|[A-Za-z0-9_$]+|[^\s]')
_STARTS = re.compile(rf"^[ \t]*({'|'.join(DECLARATIONS)})\b", re.MULTILINE)
_HEADER = re.compile(r"(\w+)(?:[ \t]+(\w+))?")


def count_words(text: str) -> int:
    """Return an estimate of the number of tokens that the parser will see."""
    return sum(not word[0].startswith("#") for word in _WORDS.finditer(text))


@dataclass(frozen=True, slots=True)
class OpenBrace:
    span: Span
    owner: str  # "rule experts", "plan"


class SourceText:
    """A file's text with its line index. Positions are 1-based lines and columns."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self._line_starts = [0, *(newline.end() for newline in re.finditer("\n", text))]
        self._tokens = [(token.start(), token[0]) for token in _TOKENS.finditer(text)]
        self._starts = [(start.start(), start.start(1)) for start in _STARTS.finditer(text)]  # of line and word

    def span(self, start: int, stop: int) -> Span:
        line, column = self._position(start)
        end_line, end_column = self._position(stop)
        return Span(self.file, line, column, end_line, end_column)

    def offset(self, line: int, column: int) -> int:
        return self._line_starts[line - 1] + column - 1

    def end(self) -> Span:
        """Return the position after the last character that is not white space."""
        stop = len(self.text.rstrip())
        return self.span(stop, stop + 1) if stop < len(self.text) else self._after(stop)

    def comments(self) -> tuple[Comment, ...]:
        return tuple(
            Comment(text, span=self.span(start, start + len(text)))
            for start, text in self._tokens
            if text.startswith("#")
        )

    def too_deep(self, limit: int) -> Span | None:
        """Return the first bracket nested deeper than the limit."""
        depth = 0
        for start, text in self._tokens:
            depth += (text in "([{") - (text in ")]}")
            if depth > limit:
                return self.span(start, start + 1)
        return None

    def open_brace(self, before: int) -> OpenBrace | None:
        """Return the innermost `{` still open at an offset, in the last declaration begun before it."""
        stack: list[int] = []
        for start, text in self._tokens:
            if start >= before:
                break
            if text == "{":
                stack.append(start)
            elif text == "}" and stack:
                stack.pop()
        if not stack:
            return None
        index = bisect_right(self._starts, (stack[-1], 0)) - 1
        owner = self._owner(self._starts[index][1]) if index >= 0 else "the block"
        return OpenBrace(self.span(stack[-1], stack[-1] + 1), owner)

    def next_declaration(self, after: int) -> int | None:
        """Return the offset of the first line, at or after an offset, that begins a declaration."""
        return next((line for line, word in self._starts if word >= after), None)

    def from_declaration(self, offset: int, stop: int | None = None) -> str:
        """Return the text from an offset at the start of a line, preceded by empty lines to keep line numbers."""
        return "\n" * (bisect_right(self._line_starts, offset) - 1) + self.text[offset:stop]

    def declarations(self) -> Iterator[str]:
        """Yield the text of each declaration, up to the next one, preceded by empty lines to keep line numbers."""
        starts = [line for line, _ in self._starts]
        stops = [*starts[1:], len(self.text)]
        return (self.from_declaration(start, stop) for start, stop in zip(starts, stops, strict=False))

    def _owner(self, start: int) -> str:
        header = _HEADER.match(self.text, start)
        assert header is not None, "a declaration begins with a word"
        kind, name = header[1], header[2]
        return f"{kind} {name}" if name and kind not in ("plan", "lora") else kind

    def _position(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def _after(self, stop: int) -> Span:
        line, column = self._position(stop)
        return Span(self.file, line, column, line, column + 1)
