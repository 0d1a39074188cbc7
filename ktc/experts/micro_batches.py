"""Several micro-batches as one call of a layer of experts, so that the weights are read once for all of them.

In: micro-batches as the experts take them one by one. Out: one batch of all their tokens, and what was computed of it
cut again. Autograd sees a concatenation and a split around the layer's one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Hidden states (T, H), the experts of each token (T, K) int64, and their weights (T, K). T may be 0."""

    hidden: Tensor
    index: Tensor
    weights: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """As an experts module takes them."""
        return self.hidden, self.index, self.weights


def joined(batches: Sequence[MicroBatch]) -> MicroBatch:
    """All tokens in a row. A batch alone is not copied. Raises `ValueError` where dtypes differ."""
    if len(batches) == 1:
        return batches[0]
    columns = tuple(zip(*(batch.tensors for batch in batches), strict=True))
    for name, tensors in zip(("hidden states", "indices", "weights"), columns, strict=True):
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"the {name} of micro-batches must share one dtype, found {found}")
    return MicroBatch(*(torch.cat(tensors) for tensors in columns))


def cut(out: Tensor, batches: Sequence[MicroBatch]) -> tuple[Tensor, ...]:
    """The rows of each batch."""
    return torch.split(out, [batch.hidden.shape[0] for batch in batches])
