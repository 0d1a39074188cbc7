"""The request of `ktc bench generate`: from the typed words to a `Request`. Refused: invalid options (U030)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ktc.diagnostics import Diagnostic, InputRefused, listing, suggest

Impl = Literal["ktc", "eager", "hf"]
IMPLS: Final[tuple[Impl, ...]] = ("ktc", "eager", "hf")
_MOST_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """One run. `layers` None is the whole depth. `eager` is ktc's model without graphs, `hf` stock on one GPU.

    A row generates `steps` tokens for each of `batch` sequences after a prompt of `context` tokens.
    """

    model: str
    rule: str
    settings: Mapping[str, str]
    layers: int | None
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    impls: tuple[Impl, ...]
    seed: int = 0


def parse(
    *, model: str, rule: str, settings: Mapping[str, str], weight_format: str | None, layers: int | None, batches: str,
    contexts: str, steps: int, impls: str,
) -> Request:  # fmt: skip
    """Return the request. Lists are comma-separated. Raise InputRefused (U030)."""
    asked = {} if weight_format is None else {"format": weight_format}
    if not asked.items() <= {**asked, **settings}.items():
        raise refused("`--format` and `--set format=` name two formats")
    words = tuple(dict.fromkeys(word.strip() for word in impls.split(",") if word.strip()))
    for word in words:
        if word not in IMPLS:
            raise refused(f"`--impl` knows no `{word}`", suggest(word, IMPLS) or f"there are {listing(IMPLS)}")
    return Request(
        model=model,
        rule=rule,
        settings={**asked, **settings},
        layers=layers,
        batches=_numbers("--batch", batches),
        contexts=_numbers("--context", contexts),
        steps=steps,
        impls=tuple(impl for impl in IMPLS if impl in words),
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= _MOST_TOKENS):
            raise refused(f"`{option}` takes numbers from 1 to {_MOST_TOKENS}, found `{word}`")
    if not words:
        raise refused(f"`{option}` names no number")
    return tuple(dict.fromkeys(map(int, words)))


def refused(message: str, hint: str = "`ktc bench generate --help` lists the options") -> InputRefused:
    """Return the refusal of an invalid option."""
    return InputRefused(Diagnostic("U030", message, hint=hint))
