"""What is compared: models that train, models that serve, tokens, and how each side computes.

In: the words of the command. Out: a frozen `Request`. Refused: names that are used twice or unknown, and options
without effect (V810).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ktc.diagnostics import Diagnostic, InputRefused, listing

Against = Literal["trainer", "stock"]
Precision = Literal["bf16", "fp32"]
Stack = Literal["auto", "on", "off"]
Attention = Literal["as compiled", "eager", "sdpa"]


@dataclass(frozen=True, slots=True)
class Model:
    """A compiled folder by the name that a table has for it. The adapter is that of its training."""

    name: str
    folder: Path
    adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Every model of `trained` is compared with every model of `served`, which gets the adapter of the former.

    With `merged` models that serve get no adapter. `sequences` of `length` tokens are compared, decoding begins after
    `prompt` of them, `batch_size` sequences are decoded side by side. A question that shows `images` precedes each.
    """

    trained: tuple[Model, ...]
    served: tuple[Model, ...]
    against: Against = "trainer"
    merged: bool = False
    text: Path | None = None
    images: tuple[Path, ...] = ()
    sequences: int = 4
    length: int = 64
    prompt: int = 16
    batch_size: int = 1
    precision: Precision = "bf16"
    stack: Stack = "auto"
    attention: Attention = "as compiled"
    seed: int = 0
    weights: Path | None = None
    trusted: bool = False

    def __post_init__(self) -> None:
        if self.prompt >= self.length:
            message = f"a prompt of {self.prompt} tokens leaves none of {self.length} to decode"
            raise InputRefused(Diagnostic("V810", message, hint="`--prompt` must be below `--tokens`"))


def models(words: Sequence[str], adapters: Sequence[str] = ()) -> tuple[Model, ...]:
    """Return the models of `[NAME=]OUT`, with the adapters of `[NAME=]FOLDER`; one without a name is of all models.

    A folder without a name has its own. Raises InputRefused (V810).
    """
    named = [_split(word) for word in words]
    names = [name or folder.resolve().name for name, folder in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        message = f"two models have the name `{twice[0]}`"
        raise InputRefused(Diagnostic("V810", message, hint="give names: `bf16=OUT_A int4=OUT_B`"))
    chosen = _adapters(names, [_split(word) for word in adapters])
    return tuple(Model(name, folder, chosen.get(name)) for name, (_, folder) in zip(names, named, strict=True))


def _adapters(names: Sequence[str], given: Sequence[tuple[str, Path]]) -> Mapping[str, Path]:
    adapters: dict[str, Path] = {}
    for name, folder in given:
        if name and name not in names:
            message = f"`--adapter {name}={folder}` names no model that trains"
            raise InputRefused(Diagnostic("V810", message, hint=f"these are named: {listing(list(names))}"))
        for model in [name] if name else names:
            if model in adapters:
                raise InputRefused(Diagnostic("V810", f"`{model}` has two adapters", hint="name one of them"))
            adapters[model] = folder
    return adapters


def _split(word: str) -> tuple[str, Path]:
    """Split `NAME=FOLDER`. A folder that exists as written is not split."""
    name, equals, folder = word.partition("=")
    return (name, Path(folder)) if equals and not Path(word).exists() else ("", Path(word))
