"""One row of the zoo: a family, its trap, its near-twin and what the compiler is expected to make of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FAMILIES: Final = Path(__file__).parent / "families"
REWRITTEN: Final = "rewritten"


@dataclass(frozen=True, slots=True)
class Family:
    """A family whose code is `families/NAME.py`.

    Args:
        name: The file's name, and the model folder's.
        old, new: The near-twin is the same code with `old`, which occurs once, replaced by `new`.
        expected, near: The outcome of the family and of its near-twin: `rewritten`, `rewritten 2 of 4` (layers), or a
            fragment of the reason why the experts stay as they are.
        settings: Settings of its config beside those that all families share.
        attention: Fragments of the reasons why attention keeps its own code in the program for inference, for the
            family and for its near-twin: "" where a kernel decodes. None: the family is not compiled for inference.
    """

    name: str
    old: str
    new: str
    expected: str = REWRITTEN
    near: str = REWRITTEN
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    attention: tuple[str, str] | None = None

    @property
    def trap(self) -> str:
        """The property that a compiler may overlook: the first line of the family's code."""
        return self.code.partition("\n")[0].strip('"')

    @property
    def code(self) -> str:
        """The family's code."""
        return (FAMILIES / f"{self.name}.py").read_text(encoding="utf-8")

    @property
    def near_code(self) -> str:
        """The code of the near-twin."""
        assert self.code.count(self.old) == 1, f"`{self.old}` occurs {self.code.count(self.old)} times in {self.name}"
        return self.code.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Case:
    """A family or its near-twin: one model to compile."""

    family: Family
    is_near: bool

    @property
    def name(self) -> str:
        """The name of the model folder."""
        return f"{self.family.name}_near" if self.is_near else self.family.name

    @property
    def code(self) -> str:
        """The code of this model."""
        return self.family.near_code if self.is_near else self.family.code

    @property
    def expected(self) -> str:
        """The expected outcome."""
        return self.family.near if self.is_near else self.family.expected

    @property
    def attention(self) -> str | None:
        """A fragment of the reason why attention keeps its own code, None for a family without that trap."""
        return None if self.family.attention is None else self.family.attention[self.is_near]

    def is_met_by(self, outcome: str, attention: str = "") -> bool:
        """Return whether the outcome of a compilation is the expected one, and the reasons for its attention."""
        if (self.attention or "") not in attention or bool(self.attention) != bool(attention):
            return False
        if self.expected.startswith(REWRITTEN):
            return outcome == self.expected
        return outcome.startswith(("left: ", "refused: ")) and self.expected in outcome
