"""`keep`: a node stays unchanged. The target fills one facet, so that no other rule fills it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ktc.model.targets.settings import EnumName, Facet
from ktc.model.targets.target import Target


@dataclass(frozen=True, slots=True)
class Keep(Target):
    """`facet` is the one to leave alone."""

    facet: Annotated[Facet, EnumName("facet")]

    name: ClassVar = "keep"
    fixed_facet: ClassVar = None
    accepts: ClassVar = ("*",)
    keeps: ClassVar = True

    @property
    def claimed_facet(self) -> Facet:
        """Return the facet that the setting names."""
        return self.facet
