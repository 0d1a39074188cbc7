"""The calls of a model of the zoo, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

VOCABULARY: Final = 256
SEED: Final = 5
Inputs = Mapping[str, Tensor]


def inputs() -> dict[str, Inputs]:
    """Return the calls by name: one token, two ways of padding, and a text longer than every limit of a family."""
    generator = torch.Generator().manual_seed(SEED)

    def ids(batch: int, length: int) -> Tensor:
        return torch.randint(1, VOCABULARY, (batch, length), generator=generator)

    left = torch.ones(3, 37, dtype=torch.long)
    left[1, :9], left[2, :20] = 0, 0
    return {
        "1 token": {"input_ids": ids(1, 1)},
        "3 x 37, padded left": {"input_ids": ids(3, 37), "attention_mask": left},
        "3 x 37, padded right": {"input_ids": ids(3, 37), "attention_mask": left.flip(1)},
        "5 x 11": {"input_ids": ids(5, 11)},
        "1 x 700": {"input_ids": ids(1, 700)},
    }


def real(logits: Tensor, call: Inputs) -> Tensor:
    """Return the logits of tokens that are not padding."""
    return logits[call["attention_mask"].bool()] if "attention_mask" in call else logits
