"""The pairs (token, choice) of a call, sorted by expert: which rows an expert multiplies, and where its results go.

In: the router's choice (T, K). Out: for a run of neighbouring experts the tokens of its rows and where each expert's
rows end. Results come back in a fixed order of sums, without atomic additions, so that runs are equal to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ktc.experts.compiled_functions import compiled_on


@dataclass(frozen=True, slots=True)
class Slots:
    """S = T * K slots in order of expert, and of token for equal experts.

    `tokens`, `pairs` and `experts` (S,) int64 are the token, the index token * K + k, and the expert of a slot.
    `places` (T, K) int64 is the slot of each pair, `bounds` has the first slot of each expert and S.
    """

    tokens: Tensor
    pairs: Tensor
    experts: Tensor
    places: Tensor
    ends: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, index_TK: Tensor, num_experts: int) -> Slots:
        """Sort the choices of all tokens. Waits for the device, which counts the slots."""
        flat = index_TK.flatten()
        experts, pairs = torch.sort(flat, stable=True)
        places = torch.empty_like(pairs)
        places[pairs] = torch.arange(len(pairs), device=pairs.device)
        ends = torch.bincount(flat, minlength=num_experts).cumsum(0)
        bounds = (0, *cast("list[int]", ends.tolist()))
        tokens = pairs // index_TK.shape[1]
        return cls(tokens, pairs, experts, places.view_as(index_TK), ends.to(torch.int32), bounds)

    @property
    def chosen(self) -> tuple[int, ...]:
        """The experts that have slots, in ascending order."""
        return tuple(e for e, (first, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)) if end > first)

    def of_experts(self, run: range) -> Rows:
        """Return the rows of neighbouring experts."""
        first, end = self.bounds[run.start], self.bounds[run.stop]
        return Rows(
            self.tokens[first:end], self.pairs[first:end], self.experts[first:end] - run.start,
            self.ends[run.start : run.stop] - first, first,
        )  # fmt: skip

    def add(self, total: Tensor, rows: Tensor, first: int, weights_TK: Tensor | None = None) -> Tensor:
        """Add rows, of the slots from `first` on, to their tokens: `(T, H), (R, H) -> (T, H)` in the dtype of `total`.

        With routing weights each row is multiplied by its own. A token's rows are added in the order of its choices.
        """
        return compiled_on(total.device, add_rows)(total, rows, self.places - first, weights_TK)


@dataclass(frozen=True, slots=True)
class Rows:
    """The slots of G neighbouring experts: token, pair and expert within the run of each, and where experts end."""

    tokens: Tensor
    pairs: Tensor
    experts: Tensor
    ends: Tensor
    first: int


def add_rows(total: Tensor, rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Add to each token its rows, at `places_TK`; places outside of `rows` count as zero."""
    inside = (places_TK >= 0) & (places_TK < len(rows))
    places = places_TK.clamp(0, len(rows) - 1)
    for k in range(places_TK.shape[1]):
        values = rows[places[:, k]].to(total.dtype)
        if weights_TK is not None:
            values = values * weights_TK[:, k, None]
        total = total + torch.where(inside[:, k, None], values, 0)
    return total
