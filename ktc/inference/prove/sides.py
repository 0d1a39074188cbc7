"""The three sides of a comparison on real weights, and both models with one group of tensors at a time.

`baseline` is stock in fp32, `stock` the same model in its own dtype, `ktc` the compiled one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ktc.foundation.progress import Tally
from ktc.inference.prove.compiled import CompiledLayers
from ktc.model.compare.groups import OUTSIDE
from ktc.model.compare.opened import Opened
from ktc.model.compare.stock import StockModel

T = TypeVar("T")


class Sides(NamedTuple, Generic[T]):
    """A value of each side, in the order in which they are in memory."""

    baseline: T
    stock: T
    ktc: T


@dataclass(frozen=True, slots=True)
class Models:
    """The models on meta. `tally` counts the bytes that are read."""

    opened: Opened
    stock: StockModel
    compiled: CompiledLayers
    tally: Tally

    def layers_of(self, model: PreTrainedModel) -> list[nn.Module]:
        """Return the layers of either model."""
        return [model.get_submodule(group) for group in self.stock.groups]

    def in_turn(self, group: str, coarser: torch.dtype | None = None) -> Iterator[PreTrainedModel]:
        """Yield the model of each side while it has the values of `group`; one side's are in memory at a time.

        Stock computes in its own dtype, or in a `coarser` one.
        """
        for model in self.in_fp32(group):
            yield model
            self.stock.to_own_dtype(group, coarser)
            yield model
        self.compiled.load(group)
        yield self.compiled.model
        self.compiled.release(group)
        self.tally.add(self.compiled.bytes_of(group))

    def in_fp32(self, group: str) -> Iterator[PreTrainedModel]:
        """Yield the stock model while it has the values of `group` in fp32."""
        self.stock.load(group)
        yield self.stock.model
        self.stock.release(group)
        self.tally.add(self.stock.bytes_of(group))


def bytes_read(stock: StockModel, compiled: CompiledLayers, chosen: Sequence[int]) -> int:
    """Return the bytes that a comparison of the layers `chosen` reads: tensors outside are read again for the head."""
    groups = stock.groups
    times = 2 if len(chosen) == len(groups) else 1
    outside = times * (stock.bytes_of(OUTSIDE) + compiled.bytes_of(OUTSIDE))
    inside = sum(stock.bytes_of(group) for group in groups[: chosen[-1] + 1])
    return outside + inside + sum(compiled.bytes_of(groups[index]) for index in chosen)
