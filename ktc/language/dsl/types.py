"""Types of rule expressions: a scalar, an enum of the schema or a device; alone, in a list, or in a set of facts.

Ranges and the unknown type (after a reported error) exist only during checking; parameters cannot have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktc.model.targets.settings import Value


@dataclass(frozen=True, slots=True)
class Type:
    name: str
    container: Literal["one", "list", "set"] = "one"

    def __str__(self) -> str:
        return self.name if self.container == "one" else f"{self.container}[{self.name}]"

    @property
    def element(self) -> Type:
        return Type(self.name)

    @property
    def is_number(self) -> bool:
        return self in (INT, FLOAT, SIZE)


INT, FLOAT, BOOL, STRING, SIZE = (Type(name) for name in ("int", "float", "bool", "string", "size"))
RANGE = Type("range")
UNKNOWN = Type("?")
EMPTY_LIST = Type("nothing", "list")


def fits(given: Type, wanted: Type) -> bool:
    """Return whether a value of type `found` is accepted as `wanted`.

    An int is accepted as a float, and a single value as a list of one.
    """
    if UNKNOWN in (given, wanted) or given == wanted:
        return True
    if wanted.container == "list":
        return given == EMPTY_LIST or (given.container != "set" and fits(given.element, wanted.element))
    return given == INT and wanted == FLOAT


def convert(value: Value, wanted: Type) -> Value:
    """Convert a checked value to the exact form of its type: float to `float`, list to tuple."""
    if value is None:
        return None
    if wanted.container == "list":
        items = value if isinstance(value, tuple) else (value,)
        return tuple(convert(item, wanted.element) for item in items)
    return float(value) if wanted == FLOAT and isinstance(value, int) else value
