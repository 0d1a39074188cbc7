"""Dropout of what lora_A of routed experts reads: which inputs are dropped, and what the others are multiplied by.

In: a probability, the seed of a call, and the token and expert of each row. Out: the same bits as
`runtime/include/ktc/lora_dropout.hpp`, on any device and for rows in any order: forward, a forward computed again and
backward agree. Each pair of token and expert has a mask of its own, and each product.

The generator is Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its
key is the seed. The counter is a block of 8 columns, the token, the expert and the product; the result has 16 bits for
each column. Probabilities are therefore multiples of 2^-16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

AdaptedProduct = Literal["gate_up", "down"]
PRODUCTS: Final[tuple[AdaptedProduct, AdaptedProduct]] = ("gate_up", "down")  # a number is the last word of the counter
_FACTORS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_BLOCK: Final = 8  # columns of a counter
_ALL: Final = 1 << 16
_WORD: Final = 0xFFFFFFFF


def dropped_below(probability: float) -> int:
    """Return the number below which the 16 bits of an element drop it: 0 for none, 65,536 for all."""
    return round(probability * _ALL)


def kept_scale(probability: float) -> float:
    """Return what the kept elements are multiplied by, so that their mean stays; 0 where all are dropped."""
    kept = _ALL - dropped_below(probability)
    return _ALL / kept if kept else 0.0


@dataclass(frozen=True, slots=True)
class Drop:
    """Dropout in one call: the seed, an int64 scalar in host memory, and the probability for each product's input."""

    seed: Tensor
    gate_up: float
    down: float

    @classmethod
    def drawn(cls, gate_up: float, down: float) -> Drop:
        """Return dropout with a seed of PyTorch's generator of the host, for a call on any device.

        As with stock dropout, processes that train on parts of a batch from one seed have equal masks.
        """
        return cls(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"), gate_up, down)

    @classmethod
    def of(cls, seed: Tensor | None, gate_up: float, down: float) -> Drop | None:
        """Return the value with these fields, `None` without a seed."""
        return None if seed is None else cls(seed, gate_up, down)

    def of_product(self, product: AdaptedProduct, device: torch.device) -> DroppedInputs | None:
        """Return the dropout of a product's input on a device, `None` if nothing is dropped there."""
        below = dropped_below(self.gate_up if product == "gate_up" else self.down)
        if below == 0:
            return None
        seed = int(self.seed)
        # scalars that a kernel fills in: a copy to a GPU would be one from pageable memory
        keys = (torch.full((), key & _WORD, dtype=torch.int64, device=device) for key in (seed, seed >> 32))
        return DroppedInputs(torch.stack([*keys]), product, below)


@dataclass(frozen=True, slots=True)
class DroppedInputs:
    """Dropout of one product's input: the key of the generator, (2,) int64 on the device of the rows."""

    key: Tensor
    product: AdaptedProduct
    below: int

    def bits(self, tokens: Tensor, experts: Tensor, columns: int) -> Tensor:
        """Return what is kept of rows with these tokens and experts, (S,) int64 each: (S, columns / 8) uint8.

        Bit i of byte b is column 8 b + i; the columns are rounded up.
        """
        return bits_of(self.key, tokens, experts, blocks_of(columns, tokens.device), self.product, self.below)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 of each counter; keys and words are int64 from 0 to 2^32 - 1."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        # the product may pass 2^63; its bits are the same, and a shift's copies of the sign are cut off
        first, second = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c1 = (second >> 32) & _WORD ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> 32) & _WORD ^ c3 ^ k1, first & _WORD
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3


def blocks_of(columns: int, device: torch.device) -> Tensor:
    """Return the numbers of the blocks of a row's columns, int64."""
    return torch.arange(-(-columns // _BLOCK), device=device)


def bits_of(
    key: Tensor, tokens: Tensor, experts: Tensor, blocks: Tensor, product: AdaptedProduct, below: int
) -> Tensor:  # fmt: skip
    """See `DroppedInputs.bits`: a function of tensors and constants, which a GPU's compiler takes.

    `blocks` are an input because torch.compile 2.11 multiplies an index that it makes itself in int32.
    """
    last = torch.full_like(blocks, PRODUCTS.index(product))
    words = philox((key[0], key[1]), (blocks, tokens[:, None], experts[:, None], last))
    kept = torch.zeros((), dtype=torch.int64, device=tokens.device)
    for number, word in enumerate(words):
        kept = kept | ((word & 0xFFFF) >= below).long() << 2 * number
        kept = kept | ((word >> 16) >= below).long() << 2 * number + 1
    return kept.to(torch.uint8)


def kept_only(rows: Tensor, bits: Tensor) -> Tensor:
    """Return rows (S, C) with zeros for what is dropped by `bits`, (S, C / 8 rounded up) uint8."""
    column = torch.arange(rows.shape[1], device=rows.device)
    kept = bits[:, column // _BLOCK] >> (column % _BLOCK).to(torch.uint8) & 1
    return torch.where(kept.bool(), rows, 0)
