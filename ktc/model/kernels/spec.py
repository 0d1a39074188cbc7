"""`Spec`: what one kernel is generated from, of any kind."""

from __future__ import annotations

from dataclasses import Field
from typing import Any, ClassVar, Protocol

from ktc.foundation.isa import Isa


class Spec(Protocol):
    """The source of one kernel of any kind: a hashable dataclass with all that the kind's template reads."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def op(self) -> str:
        """The name of its kind."""
        ...

    @property
    def entry(self) -> str:
        """The name under which the kernel library exposes it."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype that it computes in."""
        ...

    @property
    def isa(self) -> Isa:
        """The instruction set that it is built for."""
        ...

    @property
    def summary(self) -> tuple[str, ...]:
        """The computation, its sizes H, I, E and k, and the weight format, for a table of kernels."""
        ...
