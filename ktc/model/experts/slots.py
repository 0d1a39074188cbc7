"""The pairs (token, choice) of a call, sorted by expert: which rows an expert multiplies, and where its results go.

In: the router's choice (T, K). Out: for a run of neighbouring experts the tokens of its rows and where each expert's
rows end. Results come back in a fixed order of sums, without atomic additions, so that runs are equal to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ktc.model.experts.compiled_functions import compiled_on, has_compiler
from ktc.model.experts.reference import check_routing
from ktc.model.kernels.triton_support import lacking


@dataclass(frozen=True, slots=True)
class Slots:
    """S = T * K slots in order of expert, and of token for equal experts.

    `tokens`, `pairs` and `experts` (S,) int64 are the token, the index token * K + k, and the expert of a slot.
    `places` (T, K) int64 is the slot of each pair, `ends` (E,) int32 the end of each expert's slots; `bounds` has the
    first slot of each expert and S, on the host.
    """

    tokens: Tensor
    pairs: Tensor
    experts: Tensor
    places: Tensor
    ends: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, index_TK: Tensor, num_experts: int) -> Slots:
        """Sort the choices of all tokens. Waits for the device, which counts the slots.

        Raises `IndexError` for an expert that does not exist.
        """
        experts, pairs = torch.sort(index_TK.flatten(), stable=True)
        places = torch.empty_like(pairs)
        places[pairs] = torch.arange(len(pairs), device=pairs.device)
        edges = torch.searchsorted(experts, torch.arange(num_experts + 1, device=experts.device))
        bounds = tuple(cast("list[int]", edges.tolist()))
        if bounds[0] != 0 or bounds[-1] != len(pairs):
            check_routing(index_TK, num_experts)
        tokens = pairs // index_TK.shape[1]
        return cls(tokens, pairs, experts, places.view_as(index_TK), edges[1:].to(torch.int32), bounds)

    def to(self, device: torch.device) -> Slots:
        """Return the slots on a device."""
        if self.tokens.device == device:
            return self
        tensors = self.tokens, self.pairs, self.experts, self.places, self.ends
        tokens, pairs, experts, places, ends = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return Slots(tokens, pairs, experts, places, ends, self.bounds)

    @property
    def chosen(self) -> tuple[int, ...]:
        """The experts that have slots, in ascending order."""
        return tuple(e for e, (first, end) in enumerate(itertools.pairwise(self.bounds)) if end > first)

    def span(self, run: range) -> tuple[int, int]:
        """Return the first slot of neighbouring experts, and the slot after their last."""
        return self.bounds[run.start], self.bounds[run.stop]

    def parts(self, run: range, most: int) -> Iterator[range]:
        """Cut neighbouring experts into runs of at most `most` slots, or of one expert; leave out those without."""
        first = run.start
        for expert in run:
            if self.bounds[first] < self.bounds[expert] and self.bounds[expert + 1] - self.bounds[first] > most:
                yield range(first, expert)
                first = expert
        if self.bounds[first] < self.bounds[run.stop]:
            yield range(first, run.stop)

    def of_experts(self, run: range) -> Rows:
        """Return the rows of neighbouring experts."""
        first, end = self.span(run)
        return Rows(
            self.tokens[first:end], self.pairs[first:end], self.experts[first:end],
            self.ends[run.start : run.stop] - first, first, end, run.start,
        )  # fmt: skip

    def sums(
        self, rows: Tensor, run: range, dtype: torch.dtype, weights_TK: Tensor | None = None, *, rounded: bool = False
    ) -> Tensor:
        """Sum the rows of each token, of the slots of `run`: `(R, H) -> (T, H)`, in `dtype`, or `rounded` to the rows'.

        With routing weights each row is multiplied by its own. A token's rows are added in the order of its choices.
        """
        to = rows.dtype if rounded else dtype
        if len(rows) == 0:
            return rows.new_zeros((len(self.places), rows.shape[1]), dtype=to)
        return sums_of_rows(rows, self.places, weights_TK, self.span(run)[0], dtype, to)


@dataclass(frozen=True, slots=True)
class Rows:
    """The slots of G neighbouring experts: token, pair and expert of each, and where experts end.

    They are the slots from `first` until before `end`, of the experts from `start` on.
    """

    tokens: Tensor
    pairs: Tensor
    numbers: Tensor
    ends: Tensor
    first: int
    end: int
    start: int = 0

    @property
    def experts(self) -> Tensor:
        """The expert of each slot within the run."""
        return self.numbers - self.start if self.start else self.numbers


def sums_of_rows(
    rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None, first: int, dtype: torch.dtype,
    to: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Sum for each token the rows at `places_TK - first` in `dtype`, by a kernel where the device has it.

    The results are of the dtype `to`, None: as the sums.
    """
    if dtype == torch.float32 and sums_by_kernel(rows.device):
        from ktc.model.experts.sum_kernels import summed

        return summed(rows, places_TK, weights_TK, first, to or dtype)
    places_TK = places_TK - first if first else places_TK
    return compiled_on(rows.device, sum_rows)(rows, places_TK, weights_TK, dtype).to(to or dtype)


def sums_by_kernel(device: torch.device) -> bool:
    """Return whether the kernel that sums rows runs on a device."""
    return device.type == "cuda" and has_compiler() and not lacking(device)


def sum_rows(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum for each token the rows at `places_TK`; places outside of `rows` count as zero."""
    inside = (places_TK >= 0) & (places_TK < len(rows))
    places = places_TK.clamp(0, len(rows) - 1)
    total = torch.zeros((), dtype=dtype, device=rows.device)
    for k in range(places_TK.shape[1]):
        values = rows[places[:, k]].to(dtype)
        if weights_TK is not None:
            values = values * weights_TK[:, k, None]
        total = total + torch.where(inside[:, k, None], values, 0)
    return total
