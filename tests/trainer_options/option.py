"""The classes by which a field of an argument class is classified: `Tried` changes numbers, `Untried` has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Tried:
    """Values that are tried one by one, each beside the options that it needs, on `rows` other than the usual ones.

    `refused` is the code by which ktc's trainers refuse them.
    """

    values: tuple[Any, ...]
    beside: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Untried:
    """An option that changes no number of a run, or that needs more than this machine."""

    reason: str


Option: TypeAlias = Tried | Untried
Options: TypeAlias = Mapping[str, Option]


def tried(*values: Any, rows: str = "", refused: str = "", **beside: Any) -> Tried:
    """Return the option whose `values` are tried beside other options."""
    return Tried(values, beside, rows, refused)


def untried(reason: str, *names: str) -> dict[str, Option]:
    """Return the options `names`, which all have the same reason."""
    return dict.fromkeys(names, Untried(reason))
