"""`quantize`: weights are packed on a quantisation's grid when the model is compiled, for inference.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktc.targets.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class Quantize(Quantisation):
    """Packed weights; no adapter trains on them."""

    name: ClassVar = "quantize"
