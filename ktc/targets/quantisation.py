"""The settings that `fake_quant` and `quantize` share: training on a grid, and packing weights on the same grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ktc.targets.settings import Bounds, Dtype, Words
from ktc.targets.target import Target


@dataclass(frozen=True, slots=True)
class Quantisation(Target):
    """`group` weights along the contraction share a scale; `pack` is the layout that packed weights will have."""

    format: Annotated[Literal["int4", "int8", "fp8"], Words("quant")]
    group: Annotated[int, Bounds(8, 4096)] = 32
    symmetric: bool = True
    scale: Dtype = "bf16"
    pack: Annotated[Literal["none", "int32x8", "gguf_q4_k"], Words("pack")] = "none"

    fills: ClassVar = "quant"
    accepts: ClassVar = ("linear", "experts", "moe", "mlp")
    # Layouts of packed weights that hold one format only.
    packs: ClassVar[Mapping[str, str]] = {"int32x8": "int4", "gguf_q4_k": "int4"}
