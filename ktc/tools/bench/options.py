"""The fields of a benchmark's request: how each is written on the command line, and the values that it takes.

In: a frozen dataclass with fields made here, and the words of a command line. Out: the dataclass with checked values.
Refused: invalid words (U030).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

from ktc.diagnostics import Diagnostic, InputRefused, listing, suggest

T = TypeVar("T")

MOST_TOKENS: Final = 1 << 20
THREADS: Final = "CPU threads. One thread measures CPU time, more measure wall time."


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line. `read` converts the text of a field that is not of a type of typer.

    `flag` "" stands for the field's name with hyphens.
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    read: Callable[[str, str], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One run of a benchmark. `module` measures it: its function `run` returns a `Report`."""

    command: ClassVar[str]
    module: ClassVar[str]
    picture: ClassVar[str] = ""  # the name of its plot

    def checked(self) -> Self:
        """Return the request with derived values. Raise InputRefused (U030) for values that contradict each other."""
        return self

    @property
    def files(self) -> Mapping[str, Path | None]:
        """Files that the run writes beside its results, by option."""
        return {}

    @property
    def following(self) -> tuple[object, ...]:
        """The words of a command that usually follows, empty for a compilation."""
        return ()

    def refused(self, message: str, hint: str = "") -> InputRefused:
        """Return the refusal of an invalid option."""
        return refused(message, hint or f"`ktc bench {self.command} --help` lists the options")


R = TypeVar("R", bound=Request)


def option(default: object, text: str, **details: Any) -> Any:
    """Make a field of a type that typer reads; `details` are those of `Option`."""
    return field(default=default, metadata={"option": Option(text, **details)})


def numbers(default: tuple[int, ...], text: str, flag: str, *, least: int, most: int, empty: bool = False) -> Any:
    """Make a field of comma-separated numbers. `empty`: it may have none."""
    return option(default, text, flag=flag, metavar="N,...", read=partial(_numbers, least, most, empty))


def words(default: tuple[str, ...], text: str, flag: str, known: Iterable[str] = (), metavar: str = "NAME,...") -> Any:
    """Make a field of comma-separated words, of `known` if there are any."""
    return option(default, text, flag=flag, metavar=metavar, read=partial(_words, tuple(known)))


def parse(kind: type[R], typed: Mapping[str, Any]) -> R:
    """Return the request of the typed words; lists are comma-separated texts. Raise InputRefused."""
    values = dict(typed)
    for declared in fields(kind):
        known: Option | None = declared.metadata.get("option")
        if known is not None and known.read is not None and declared.name in values:
            values[declared.name] = known.read(flag_of(declared), values[declared.name])
    return kind(**values).checked()


def flag_of(known: Field[Any]) -> str:
    """Return the flag of a field."""
    details: Option | None = known.metadata.get("option")
    return (details.flag if details else "") or f"--{known.name.replace('_', '-')}"


def one_of(flag: str, word: str, known: Iterable[T]) -> T:
    """Return the choice with this name. Raise InputRefused (U030)."""
    choices = {str(choice): choice for choice in known}
    if word not in choices:
        raise refused(
            f"`{flag}` knows no `{word}`", suggest(word, choices) or f"there are {listing(choices, len(choices))}"
        )
    return choices[word]


def require_threads(threads: int) -> None:
    """Raise InputRefused for more threads than this process may use: limits and peers would run on more."""
    from ktc.foundation import environment, host

    usable = max(1, host.usable_threads() // environment.local_world_size())
    if threads > usable:
        raise refused(f"`--threads {threads}` is more than the {usable} that this process may use")


def refused(message: str, hint: str = "`--help` lists the options") -> InputRefused:
    """Return the refusal of an invalid option (U030)."""
    return InputRefused(Diagnostic("U030", message, hint=hint))


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _words(known: tuple[str, ...], flag: str, text: str) -> tuple[str, ...]:
    return tuple(one_of(flag, word, known) if known else word for word in _split(text))


def _numbers(least: int, most: int, empty: bool, flag: str, text: str) -> tuple[int, ...]:
    texts = _split(text)
    for word in texts:
        if not (word.isascii() and word.isdigit() and least <= int(word) <= most):
            raise refused(f"`{flag}` takes numbers from {least} to {most}, found `{word}`")
    if not texts and not empty:
        raise refused(f"`{flag}` is empty")
    return tuple(dict.fromkeys(map(int, texts)))
