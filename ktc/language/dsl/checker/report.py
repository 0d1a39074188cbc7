"""The diagnostics of the checker's parts. Checking continues after an error, up to `MAX_ERRORS`."""

from __future__ import annotations

from ktc.diagnostics import Diagnostic, Related, Span

MAX_ERRORS = 200  # of a program: more are not helpful, and explaining each takes time


class TooManyErrors(Exception):
    """Stops a check with `MAX_ERRORS` errors; does not leave the checker."""


class Report:
    def __init__(self, diagnostics: list[Diagnostic] | None = None) -> None:
        self.errors: list[Diagnostic] = list(diagnostics or ())
        self.warnings: list[Diagnostic] = []

    def error(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        label: str = "",
        hint: str = "",
        related: tuple[Related, ...] = (),
    ) -> None:
        self.errors.append(Diagnostic(code, message, span, label, hint, related))
        if len(self.errors) >= MAX_ERRORS:
            raise TooManyErrors

    def warning(self, code: str, message: str, span: Span, *, label: str = "", hint: str = "") -> None:
        self.warnings.append(Diagnostic(code, message, span, label, hint, severity="warning"))


def in_order(diagnostics: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return diagnostics sorted by position in a file, files in order of first mention, without duplicates."""
    files = {d.span.file: None for d in diagnostics if d.span}
    order = {file: index for index, file in enumerate(files)}

    def place(diagnostic: Diagnostic) -> tuple[int, int, int]:
        span = diagnostic.span
        return (order[span.file], span.line, span.column) if span else (-1, 0, 0)

    return tuple(sorted(dict.fromkeys(diagnostics), key=place))
