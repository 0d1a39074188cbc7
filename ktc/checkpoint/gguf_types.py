"""The tensor types of GGUF files: name by number, weights per block and bytes per block.

Names are those of ggml in lower case. Plain numeric types have the names of safetensors in ktc (`bf16`, `i32`). Numbers
that ggml no longer uses are not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktc.checkpoint.header import ITEM_SIZE


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type that stores `weights` neighbours of a row in `bytes`, including their scales."""

    weights: int
    bytes: int


_BLOCK_NUMBERS: Mapping[int, tuple[str, BlockType]] = {
    2: ("q4_0", BlockType(32, 18)),
    3: ("q4_1", BlockType(32, 20)),
    6: ("q5_0", BlockType(32, 22)),
    7: ("q5_1", BlockType(32, 24)),
    8: ("q8_0", BlockType(32, 34)),
    9: ("q8_1", BlockType(32, 40)),
    10: ("q2_k", BlockType(256, 84)),
    11: ("q3_k", BlockType(256, 110)),
    12: ("q4_k", BlockType(256, 144)),
    13: ("q5_k", BlockType(256, 176)),
    14: ("q6_k", BlockType(256, 210)),
    15: ("q8_k", BlockType(256, 292)),
    16: ("iq2_xxs", BlockType(256, 66)),
    17: ("iq2_xs", BlockType(256, 74)),
    18: ("iq3_xxs", BlockType(256, 98)),
    19: ("iq1_s", BlockType(256, 50)),
    20: ("iq4_nl", BlockType(32, 18)),
    21: ("iq3_s", BlockType(256, 110)),
    22: ("iq2_s", BlockType(256, 82)),
    23: ("iq4_xs", BlockType(256, 136)),
    29: ("iq1_m", BlockType(256, 56)),
    34: ("tq1_0", BlockType(256, 54)),
    35: ("tq2_0", BlockType(256, 66)),
    39: ("mxfp4", BlockType(32, 17)),
    40: ("nvfp4", BlockType(64, 36)),
    41: ("q1_0", BlockType(128, 18)),
}
BLOCK_TYPES: Mapping[str, BlockType] = dict(_BLOCK_NUMBERS.values())
"""By the name in `TensorEntry.dtype`. `mxfp4` is ggml's own layout, not that of safetensors."""

TYPE_NAMES: Mapping[int, str] = {
    **{number: name for number, (name, _) in _BLOCK_NUMBERS.items()},
    0: "f32", 1: "f16", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 30: "bf16",
}  # fmt: skip

UNREADABLE = frozenset({"q8_1", "q8_k", "q1_0"})  # intermediate results of ggml, and what `gguf` does not dequantise


def block_of(name: str) -> BlockType:
    """Return the block of a type; a plain number is a block of one."""
    return BLOCK_TYPES.get(name) or BlockType(1, ITEM_SIZE[name])
