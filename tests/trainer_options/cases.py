"""The cases of the table: each value of each option alone, some with stacked micro-batches, and seeded pairs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainer_options.option import Tried
from trainer_options.trainers import KINDS, Kind

NUM_PAIRS: Final = 40
REFUSED: Final = frozenset({  # by stock code: a GPU, a package or a second model is missing
    "use_liger_kernel", "use_liger_kernel of loss and norms", "optim of packages", "sync_ref_model",
    "ref_model_mixup_alpha", "ref_model_sync_steps",
})  # fmt: skip
ROUNDED: Final = frozenset({"bf16", "bf16_full_eval", "fp16_full_eval"})  # as a stack adds up, and not to fp32


@dataclass(frozen=True, slots=True)
class Case:
    """A run of the trainer `kind` with `settings` beside its defaults, on its rows of that name.

    `refused` is the code by which a trainer of ktc refuses it, and "" if it does not.
    """

    kind: str
    name: str
    settings: Mapping[str, Any]
    rows: str = ""
    refused: str = ""

    @property
    def id(self) -> str:
        """The name in the table, with the trainer's."""
        return f"{self.kind}:{self.name}"


def unclassified(kind: Kind) -> set[str]:
    """Return the fields of the argument class that are missing from its table, and names there that are not fields."""
    fields = {field.name for field in dataclasses.fields(kind.arguments)}
    return fields ^ {_field(name) for name in kind.options}


def _field(name: str) -> str:
    """`lr_scheduler_kwargs of polynomial` is a further row of `lr_scheduler_kwargs`."""
    return name.partition(" of ")[0]


def alone(kind: str) -> Iterator[Case]:
    """Return the run without an option, and one for each value of each option."""
    yield Case(kind, "defaults", {})
    for name in _tried(kind):
        yield from _values(kind, name)


def _tried(kind: str, *, refused: bool = True) -> list[str]:
    """Return the options that are tried, and among them those that stock code refuses here."""
    options = KINDS[kind].options.items()
    return [name for name, option in options if isinstance(option, Tried) and (refused or name not in REFUSED)]


def _values(kind: str, name: str) -> list[Case]:
    option, field = KINDS[kind].options[name], _field(name)
    assert isinstance(option, Tried), f"`{name}` has no values"
    settings = [{**option.beside, field: value} for value in option.values]
    return [Case(kind, f"{field}={each[field]!r}", each, option.rows, option.refused) for each in settings]


def pairs(number: int = NUM_PAIRS, seed: int = 0) -> Iterator[Case]:
    """Return cases of two options at once, whose other settings agree, of each trainer in turn."""
    drawn, chosen = random.Random(seed), dict[str, Case]()
    while len(chosen) < number:
        kind = tuple(KINDS)[len(chosen) % len(KINDS)]
        names = sorted(drawn.sample(_tried(kind, refused=False), 2))
        one, other = (drawn.choice(_values(kind, name)) for name in names)
        settings = {**one.settings, **other.settings}
        agree = all(settings[name] == value for each in (one, other) for name, value in each.settings.items())
        stacked_halves = "gradient_accumulation_steps" in settings and ROUNDED & settings.keys()
        if agree and one.rows == other.rows and not stacked_halves:
            pair = Case(kind, f"{one.name} {other.name}", settings, one.rows)
            chosen[pair.id] = pair
    yield from chosen.values()


def stacked(kind: str) -> Iterator[Case]:
    """Return a case for each option's first value with two micro-batches, which share a pass over the experts."""
    two = {"gradient_accumulation_steps": 2}
    for name in _tried(kind, refused=False):
        case = _values(kind, name)[0]
        if not case.settings.keys() & {*two, *ROUNDED}:
            yield Case(kind, f"{case.name} stacked", {**two, **case.settings}, case.rows)


CASES: Final = (
    *(case for kind in KINDS for case in alone(kind)),
    *(case for kind in ("trainer", "sft") for case in stacked(kind)),
    *pairs(),
)
