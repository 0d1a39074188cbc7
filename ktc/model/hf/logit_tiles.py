"""The memory of a loss that has some logits at a time: TRL's head for fine-tuning, which `ktc train` uses.

In: the tokens of a micro-batch and the size of the vocabulary. Out: bytes on the device of the head. TRL 1.16 projects
4,096 tokens onto 32,768 entries of the vocabulary at a time (`trl.kernels`). On a GPU a tile becomes its own gradient
in place; on the CPU, PyTorch keeps fp32 copies of it, measured as 33 bytes for each logit.
"""

from __future__ import annotations

from typing import Final

_TOKENS: Final = 4096
_ENTRIES: Final = 32_768
_ON_CPU: Final = 34  # bytes of a logit of the tile and its copies
_IN_PLACE: Final = 2  # tiles: the one of the product, and the one before it until the allocator has it back


def tile_bytes(tokens: int, vocabulary: int, item: int, *, on_gpu: bool) -> int:
    """Return the bytes of the loss of `tokens` tokens, for logits of `item` bytes each."""
    return min(tokens, _TOKENS) * min(vocabulary, _ENTRIES) * (_IN_PLACE * item if on_gpu else _ON_CPU)
