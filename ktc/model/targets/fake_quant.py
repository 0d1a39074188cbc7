"""`fake_quant`: training sees the weights that INT4 will keep.

With `weights = base` a frozen base is rounded once, and adapters train beside it; a base that a rule trains is rounded
again after each optimizer step. With `weights = merged` the adapter is added before rounding. A program has one of the
two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ktc.model.targets.quantisation import Quantisation
from ktc.model.targets.settings import EnumName


@dataclass(frozen=True, slots=True)
class FakeQuant(Quantisation):
    """Quantisation-aware training. `weights` says what is rounded: those of the base, or base and adapter together."""

    weights: Annotated[Literal["base", "merged"], EnumName("rounded_weights")] = "base"

    name: ClassVar = "fake_quant"
    module: ClassVar = "fake_quant_linear"

    @property
    def merges(self) -> bool:
        """Whether the adapter is added to the weights before they are rounded."""
        return self.weights == "merged"
