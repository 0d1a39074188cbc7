"""Refusals of the libraries below: a `ValueError` of TRL, transformers or PEFT about a setting is a user's mistake.

In: an exception. Out: the library that raised it and its words, or None for any other error, which stays a bug.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused

_LIBRARIES: Final = {
    "trl": "TRL", "transformers": "transformers", "peft": "PEFT", "accelerate": "accelerate", "datasets": "datasets",
    "bitsandbytes": "bitsandbytes",
}  # fmt: skip
# The parts of torch that take settings; elsewhere its errors concern shapes and dtypes.
_OF_TORCH: Final = ("torch.optim.", "torch.utils.tensorboard")
_ABOUT_SETTINGS: Final = (ValueError, NotImplementedError, ImportError)  # others are faults of a call, or of a machine
_MOST_WORDS: Final = 400


@dataclass(frozen=True, slots=True)
class LibraryRefusal:
    """Who refuses, and its words on one line."""

    library: str
    words: str


def refusal_in(error: BaseException) -> LibraryRefusal | None:
    """Return the refusal of a setting by a library, or None if `error` is of another kind."""
    origin = origin_of(error.__traceback__)
    name = "PyTorch" if origin.startswith(_OF_TORCH) else _LIBRARIES.get(origin.partition(".")[0])
    if name is None or not isinstance(error, _ABOUT_SETTINGS) or isinstance(error, UnicodeError):
        return None
    return LibraryRefusal(name, " ".join(str(error).split())[:_MOST_WORDS] or type(error).__name__)


@contextmanager
def refused_by_libraries(code: str, what: str, hint: str) -> Generator[None]:
    """Raise `InputRefused` with `code` where a library refuses `what`, a part of the message."""
    try:
        yield
    except _ABOUT_SETTINGS as error:
        if (refusal := refusal_in(error)) is None:
            raise
        message = f"{refusal.library} refuses {what}: {refusal.words}"
        raise InputRefused(Diagnostic(code, message, hint=hint)) from error


def origin_of(trace: TracebackType | None) -> str:
    """Return the name of the module that raised the error."""
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(trace)]
    return modules[-1] if modules else ""
