"""What ktc says to its user: a located message with a code and one hint, and the errors that carry them.

A user's mistake is a `Diagnostic`; a stage that cannot go on raises a `KtcError` holding every diagnostic it found.
The exit codes are part of the command line's contract: 1 internal error or a failed proof, 2 input refused,
3 the host lacks something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a text file. Lines and columns count from 1; the end is exclusive in columns."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Related:
    """A second place that belongs to a diagnostic, with what it has to do with it."""

    span: Span
    message: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One message. `code` is stable (`E042`), `label` stands under the caret, `hint` is the one thing to do next."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    hint: str = ""
    related: tuple[Related, ...] = ()
    severity: Severity = "error"


class KtcError(Exception):
    """An operation that was refused or failed, with all its diagnostics. Never constructed without one."""

    exit_code = 1

    def __init__(self, *diagnostics: Diagnostic) -> None:
        assert diagnostics, "an error must say what is wrong"
        self.diagnostics = diagnostics
        super().__init__("; ".join(f"{d.code}: {d.message}" for d in diagnostics))


class InputRefused(KtcError):
    """The model, the rules, the settings or the output folder cannot be used as given."""

    exit_code = 2


class HostLacks(KtcError):
    """This machine lacks a compiler, an instruction set, memory or a device that the task needs."""

    exit_code = 3


class ProofFailed(KtcError):
    """A rewritten block does not compute what the original computes: the compilation stops."""

    exit_code = 1
