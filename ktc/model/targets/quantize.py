"""`quantize`: weights are rounded to a quantisation's grid when the model is loaded, for inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktc.model.targets.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class Quantize(Quantisation):
    """Quantised weights; no adapter trains on them."""

    name: ClassVar = "quantize"
    module: ClassVar = "quantized_linear"
    packs_weights: ClassVar = True
