"""Messages to the user: diagnostics with a position, a code and one hint, and the errors that carry them.

A user's mistake is a `Diagnostic`; a stage that cannot continue raises a `KtcError` with all diagnostics found.
`render` converts diagnostics to text, `to_json` to the command line's JSON. The exit codes are part of the command
line's contract: 1 internal error or a failed proof, 2 input refused, 3 the host lacks something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a text file. Lines and columns count from 1; the end column is exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Related:
    """A second position of a diagnostic, and its relation to the diagnostic."""

    span: Span
    message: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One message. `code` is stable (`E042`), `label` is shown under the caret, `hint` is the next action."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    hint: str = ""
    related: tuple[Related, ...] = ()
    severity: Severity = "error"


class KtcError(Exception):
    """An operation that was refused or failed, with at least one diagnostic.

    Its text has the place and the hint of each, because Python's own traceback shows nothing else. `sources` maps the
    files in the spans to their text, as far as known, for `render`. Equal diagnostics are one.
    """

    exit_code = 1

    def __init__(self, *diagnostics: Diagnostic, sources: Mapping[str, str] | None = None) -> None:
        assert diagnostics, "an error needs a diagnostic"
        self.diagnostics = tuple(dict.fromkeys(diagnostics))
        self.sources: Mapping[str, str] = sources or {}
        super().__init__("\n".join(line for diagnostic in self.diagnostics for line in _outside_a_command(diagnostic)))


class InputRefused(KtcError):
    """The model, the rules, the settings or the output folder cannot be used as given."""

    exit_code = 2


class HostLacks(KtcError):
    """This machine lacks a compiler, an instruction set, memory or a device that the task needs."""

    exit_code = 3


class ProofFailed(KtcError):
    """A rewritten block differs from the original: the compilation stops."""

    exit_code = 1


# Wording -------------------------------------------------------------------------------------------------------------
_LONGEST_WORD = 48  # a longer word is not a mistyped name


def causes(
    error: BaseException, raised_again: tuple[type[BaseException], ...] = (BaseException,)
) -> Iterator[BaseException]:
    """Yield the error and its causes, the newest first.

    Without a cause, what was being handled counts where the error is one of the types `raised_again`.
    """
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        context = following.__context__ if isinstance(following, raised_again) else None
        following = following.__cause__ or context


def suggest(word: str, options: Iterable[str]) -> str:
    """Return the hint "did you mean `x`?" if an option resembles `word`, otherwise an empty text."""
    near = nearest(word, options)
    return "" if near is None else f"did you mean `{near}`?"


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Return the option that resembles `word` the most, None if none does."""
    from difflib import get_close_matches

    spelt = {option.casefold(): option for option in sorted(set(options), reverse=True)}
    close = get_close_matches(word.casefold(), spelt, n=1) if 1 < len(word) <= _LONGEST_WORD else []
    return spelt[close[0]] if close else None


def listing(options: Iterable[str], limit: int = 12) -> str:
    """Return the options in backquotes, in order, cut after `limit`; "none" if there are none."""
    names = list(options)
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return (f"{shown}, ..." if len(names) > limit else shown) or "none"


# JSON ----------------------------------------------------------------------------------------------------------------
def to_json(diagnostic: Diagnostic, sources: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the object that `--json` prints for one diagnostic; a missing position is null.

    `lsp` is the same in the form of the language server protocol: lines and UTF-16 units from 0, numbered severities.
    Its columns are exact if `sources` has the file's text.
    """
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        **_place(diagnostic.span),
        "hint": diagnostic.hint,
        "related": [{"message": related.message, **_place(related.span)} for related in diagnostic.related],
        "lsp": _lsp(diagnostic, {file: text.split("\n") for file, text in (sources or {}).items()}),
    }


def _place(span: Span | None) -> dict[str, object]:
    if span is None:
        return {"file": None, "line": None, "column": None, "end_line": None, "end_column": None}
    return {
        "file": span.file,
        "line": span.line,
        "column": span.column,
        "end_line": span.end_line,
        "end_column": span.end_column,
    }


_LSP_SEVERITIES: Mapping[Severity, int] = {"error": 1, "warning": 2, "note": 3}


def _lsp(diagnostic: Diagnostic, texts: Mapping[str, list[str]]) -> dict[str, object]:
    message = ". ".join(filter(None, (diagnostic.message, diagnostic.label, diagnostic.hint)))
    return {
        "range": _lsp_range(diagnostic.span, texts),
        "severity": _LSP_SEVERITIES[diagnostic.severity],
        "code": diagnostic.code,
        "source": "ktc",
        "message": message,
        "relatedInformation": [
            {
                "location": {"uri": related.span.file, "range": _lsp_range(related.span, texts)},
                "message": related.message,
            }
            for related in diagnostic.related
        ],
    }


def _lsp_range(span: Span | None, texts: Mapping[str, list[str]]) -> dict[str, object]:
    """Return the range; without a position, an empty range at the start of the file."""
    if span is None:
        span = Span("", 1, 1, 1, 1)
    lines = texts.get(span.file, [])
    return {
        "start": _lsp_position(span.line, span.column, lines),
        "end": _lsp_position(span.end_line, span.end_column, lines),
    }


def _lsp_position(line: int, column: int, lines: list[str]) -> dict[str, int]:
    before = lines[line - 1][: column - 1] if line <= len(lines) else ""
    beyond = sum(ord(character) > 0xFFFF for character in before)  # each takes two units of UTF-16
    return {"line": line - 1, "character": column - 1 + beyond}


# Text ----------------------------------------------------------------------------------------------------------------
_COLORS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "note": "\x1b[1;36m"}
_DIM, _HELP, _BOLD, _RESET = "\x1b[34m", "\x1b[1;32m", "\x1b[1m", "\x1b[0m"
_WIDTH = 160  # maximum length of a shown source line


def render(diagnostics: Iterable[Diagnostic], sources: Mapping[str, str] | None = None, color: bool = False) -> str:
    """Return all diagnostics as text, separated by blank lines. A position shows its line if `sources` has the file.

    Control characters (escapes in an untrusted file) are shown as `?`.
    """
    texts = {file: text.split("\n") for file, text in (sources or {}).items()}
    return "\n\n".join("\n".join(_render_one(diagnostic, texts, color)) for diagnostic in diagnostics)


def _outside_a_command(diagnostic: Diagnostic) -> Iterator[str]:
    """Yield a message as an exception's text has it: `CODE: message`, its place, and the hint."""
    yield _visible(f"{diagnostic.code}: {diagnostic.message}")
    if diagnostic.span is not None:
        yield _visible(f" --> {diagnostic.span}" + (f" {diagnostic.label}" if diagnostic.label else ""))
    if diagnostic.hint:
        yield _visible(f"help: {diagnostic.hint}")


def _render_one(diagnostic: Diagnostic, texts: Mapping[str, list[str]], color: bool) -> list[str]:
    tint = _COLORS[diagnostic.severity]
    head = _paint(f"{diagnostic.severity}[{diagnostic.code}]", tint, color)
    lines = [f"{head}: {_paint(_visible(diagnostic.message), _BOLD, color)}"]
    places = [(diagnostic.span, diagnostic.label, "^", tint)] if diagnostic.span else []
    places += [(related.span, related.message, "-", _DIM) for related in diagnostic.related]
    margin = max(4, *(len(str(span.line)) + 1 for span, *_ in places)) if places else 4
    file = None
    for span, label, mark, shade in places:
        if span.file != file:
            arrow = "-->" if mark == "^" else ":::"
            lines.append(f"{_paint(arrow.rjust(margin), _DIM, color)} {_visible(str(span))}")
            file = span.file
        lines += _quote(span, texts.get(span.file), label, mark, margin, shade, color)
    if diagnostic.hint:
        lines.append(f"{_paint('help', _HELP, color)}: {_visible(diagnostic.hint)}")
    return lines


def _quote(
    span: Span, text: list[str] | None, label: str, mark: str, margin: int, shade: str, color: bool
) -> list[str]:
    """Return a position's source line with underline and label; without the text, the label alone."""
    label = _visible(label)
    if text is None or not 1 <= span.line <= len(text):
        return [f"{' ' * margin} = {label}"] if label else []
    line = text[span.line - 1]
    stop = span.end_column if span.end_line == span.line else len(line.rstrip()) + 1
    first = max(0, span.column - _WIDTH // 2) if len(line) > _WIDTH else 0
    shown = line[first : first + _WIDTH]
    length = max(1, min(stop - span.column, _WIDTH - (span.column - 1 - first)))
    indent = "".join("\t" if character == "\t" else " " for character in shown[: span.column - 1 - first])
    indent = indent.ljust(span.column - 1 - first)
    bar = _paint("|", _DIM, color)
    number = _paint(str(span.line).rjust(margin), _DIM, color)
    underline = _paint(f"{mark * length} {label}".rstrip(), shade, color)
    return [f"{number} {bar} {_visible(shown)}".rstrip(), f"{' ' * margin} {bar} {indent}{underline}"]


def _paint(text: str, code: str, color: bool) -> str:
    return f"{code}{text}{_RESET}" if color else text


def _visible(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\t" else "?" for character in text)
