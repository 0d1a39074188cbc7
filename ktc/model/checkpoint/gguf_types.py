"""The tensor types of GGUF files: name by number, weights per block and bytes per block.

Names are those of ggml in lower case. Plain numeric types have the names of safetensors in ktc (`bf16`, `i32`). Numbers
that ggml no longer uses are not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktc.foundation.formats import BLOCKS, GGUF_TYPES, Blocks
from ktc.model.checkpoint.header import ITEM_SIZE


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type that stores `weights` neighbours of a row in `bytes`, including their scales."""

    weights: int
    bytes: int


BLOCK_TYPES: Mapping[str, BlockType] = {
    row.name: BlockType(row.weights, row.block_bytes)
    for row in GGUF_TYPES.values()
    if isinstance(row, Blocks) and row.coded
}
"""By the name in `TensorEntry.dtype`. `mxfp4` is ggml's own layout, not that of safetensors."""

TYPE_NAMES: Mapping[int, str] = {
    **{number: row.stored or row.name for number, row in GGUF_TYPES.items()},
    24: "i8", 25: "i16", 26: "i32", 27: "i64",
}  # fmt: skip

UNREADABLE = frozenset({"q8_1", "q8_k", "q1_0"})  # intermediate results of ggml, and what `gguf` does not dequantise


def weights_of_block(name: str) -> int:
    """Return the weights in a block of GGUF's types, or of a kernel's own."""
    row = BLOCKS.get(name)
    return row.weights if row is not None else BLOCK_TYPES[name].weights


def block_of(name: str) -> BlockType:
    """Return the block of a type; a plain number is a block of one."""
    return BLOCK_TYPES.get(name) or BlockType(1, ITEM_SIZE[name])
