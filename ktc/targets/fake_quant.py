"""`fake_quant`: weights are rounded to a quantisation's grid in forward, so that training sees what packing will keep.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktc.targets.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class FakeQuant(Quantisation):
    """Quantisation-aware training."""

    name: ClassVar = "fake_quant"
