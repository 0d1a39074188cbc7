"""The memory of a loss that has some logits at a time: TRL's head for fine-tuning, which `ktc train` uses.

In: the tokens of a run and the size of the vocabulary. Out: bytes on the device of the head. TRL 1.16 projects 4,096
tokens onto 32,768 entries of the vocabulary at a time (`trl.kernels`). On a GPU a tile becomes its own gradient in
place; on the CPU, PyTorch keeps fp32 copies of it, measured as 33 bytes for each logit. Micro-batches of a step share
a run where that saves time.
"""

from __future__ import annotations

from typing import Final

MICRO_BATCHES: Final = 16
"""Of a step of `ktc train`, unless its user says otherwise. More of them share runs as the free memory permits."""
_TOKENS: Final = 4096
_ENTRIES: Final = 32_768
_ON_CPU: Final = 34  # bytes of a logit of the tile and its copies
_MOST_ON_CPU: Final = 1 << 30  # bytes of the tiles of several micro-batches
_IN_PLACE: Final = 2  # tiles: the one of the product, and the one before it until the allocator has it back


def tile_bytes(tokens: int, vocabulary: int, item: int, *, on_gpu: bool) -> int:
    """Return the bytes of the loss of `tokens` tokens, for logits of `item` bytes each."""
    return min(tokens, _TOKENS) * min(vocabulary, _ENTRIES) * (_IN_PLACE * item if on_gpu else _ON_CPU)


def tokens_of_run(tokens: int, vocabulary: int, *, on_gpu: bool) -> int:
    """Return how many of `tokens` tokens of several micro-batches have their losses in one run.

    Tiles take much memory on the CPU, where a run of few tokens takes no longer than its part of one of many.
    """
    return tokens if on_gpu else min(tokens, max(1, _MOST_ON_CPU // tile_bytes(1, vocabulary, 0, on_gpu=False)))


def step_bytes(tokens: int, vocabulary: int, item: int, *, on_gpu: bool) -> int:
    """Return the most bytes of a run in a step of up to `MICRO_BATCHES` micro-batches of `tokens` tokens."""
    run = max(tokens, tokens_of_run(MICRO_BATCHES * tokens, vocabulary, on_gpu=on_gpu))
    return tile_bytes(run, vocabulary, item, on_gpu=on_gpu)
