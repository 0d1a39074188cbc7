"""The pairs (token, choice) of a call, sorted by expert: which rows an expert multiplies, and where its results go.

In: the router's choice (T, K). Out: for a run of neighbouring experts the tokens of its rows and where each expert's
rows end. Results come back in a fixed order of sums, without atomic additions, so that runs are equal to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from ktc.model.experts.gpu.compiled_functions import compiled_on, has_compiler
from ktc.model.experts.references.reference import check_routing
from ktc.model.kernels.triton_support import lacking

_MOST_PAIRS: Final = 1 << 30  # that are sorted by the kernel, whose numbers have 32 bits
_BLOCK: Final = 128  # of these pairs; each has a number for each expert


class Edges:
    """The first slot of each expert, and S: on a device, and on the host once they are read."""

    def __init__(self, on_device: Tensor, index_TK: Tensor) -> None:
        self._on_device, self._index_TK = on_device, index_TK
        self._bounds: tuple[int, ...] | None = None

    @property
    def bounds(self) -> tuple[int, ...]:
        """The same on the host. Waits for the device. Raises `IndexError` for an expert that does not exist."""
        if self._bounds is None:
            bounds = tuple(cast("list[int]", self._on_device.tolist()))
            if bounds[0] != 0 or bounds[-1] != self._index_TK.numel():
                check_routing(self._index_TK, len(bounds) - 1)
            self._bounds = bounds
        return self._bounds


@dataclass(frozen=True, slots=True)
class Slots:
    """S = T * K slots in order of expert, and of token for equal experts.

    `tokens`, `pairs` and `experts` (S,) int64 are the token, the index token * K + k, and the expert of a slot.
    `places` (T, K) int64 is the slot of each pair, `ends` (E,) int32 the end of each expert's slots. A call
    for all experts at once needs no `bounds` on the host, and no waiting.
    """

    tokens: Tensor
    pairs: Tensor
    experts: Tensor
    places: Tensor
    ends: Tensor
    edges: Edges

    @classmethod
    def of(cls, index_TK: Tensor, num_experts: int) -> Slots:
        """Sort the choices of all tokens.

        An expert that does not exist is an `IndexError` of a CPU, and of a GPU where bounds are read; otherwise it
        is an error of the GPU itself.
        """
        if sorts_by_kernel(index_TK.device, index_TK.numel(), num_experts):
            return cls._by_kernel(index_TK, num_experts)
        experts, pairs = torch.sort(index_TK.flatten(), stable=True)
        places = torch.empty_like(pairs)
        places[pairs] = torch.arange(len(pairs), device=pairs.device)
        numbers = torch.arange(num_experts + 1, device=experts.device)
        on_device = torch.searchsorted(experts, numbers)
        edges, tokens = Edges(on_device, index_TK), pairs // index_TK.shape[1]
        if index_TK.device.type == "cpu":
            assert edges.bounds, "a CPU is not waited for"
        else:
            experts = numbers[:num_experts].index_select(0, experts)  # an error for one that does not exist
        return cls(tokens, pairs, experts, places.view_as(index_TK), on_device[1:].to(torch.int32), edges)

    @classmethod
    def _by_kernel(cls, index_TK: Tensor, num_experts: int) -> Slots:
        from ktc.model.experts.gpu.slot_kernels import sorted_pairs

        index_TK = index_TK.contiguous()
        numbers = torch.arange(num_experts, device=index_TK.device)
        numbers.index_select(0, index_TK.view(-1))  # an error for one that does not exist
        made = sorted_pairs(index_TK, num_experts)
        return cls(made.tokens, made.pairs, made.experts, made.places, made.ends, Edges(made.edges, index_TK))

    def to(self, device: torch.device) -> Slots:
        """Return the slots on a device."""
        if self.tokens.device == device:
            return self
        tensors = self.tokens, self.pairs, self.experts, self.places, self.ends
        tokens, pairs, experts, places, ends = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return Slots(tokens, pairs, experts, places, ends, self.edges)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first slot of each expert and S, on the host, see `Edges.bounds`."""
        return self.edges.bounds

    def are_of(self, run: range) -> bool:
        """Return whether a run has all slots, known without waiting: it has all experts, and there are slots."""
        return len(self.tokens) > 0 and run == range(len(self.ends))

    @property
    def chosen(self) -> tuple[int, ...]:
        """The experts that have slots, in ascending order."""
        return tuple(e for e, (first, end) in enumerate(itertools.pairwise(self.bounds)) if end > first)

    def span(self, run: range) -> tuple[int, int]:
        """Return the first slot of neighbouring experts, and the slot after their last."""
        return (0, len(self.tokens)) if self.are_of(run) else (self.bounds[run.start], self.bounds[run.stop])

    def parts(self, run: range, most: int) -> Iterator[range]:
        """Cut neighbouring experts into runs of at most `most` slots, or of one expert; leave out those without."""
        if self.are_of(run) and len(self.tokens) <= most:
            yield run
            return
        first = run.start
        for expert in run:
            if self.bounds[first] < self.bounds[expert] and self.bounds[expert + 1] - self.bounds[first] > most:
                yield range(first, expert)
                first = expert
        if self.bounds[first] < self.bounds[run.stop]:
            yield range(first, run.stop)

    def of_experts(self, run: range) -> Rows:
        """Return the rows of neighbouring experts."""
        if self.are_of(run):
            return Rows(self.tokens, self.pairs, self.experts, self.ends, 0, len(self.tokens))
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
        from ktc.model.experts.gpu.sum_kernels import summed

        return summed(rows, places_TK, weights_TK, first, to or dtype)
    places_TK = places_TK - first if first else places_TK
    return compiled_on(rows.device, sum_rows)(rows, places_TK, weights_TK, dtype).to(to or dtype)


def sums_by_kernel(device: torch.device) -> bool:
    """Return whether the kernels that sort pairs and sum rows run on a device."""
    return device.type == "cuda" and has_compiler() and not lacking(device)


def sorts_by_kernel(device: torch.device, pairs: int, num_experts: int) -> bool:
    """Return whether the kernel sorts the pairs of a call: none and very many are sorted by PyTorch."""
    return 0 < pairs * max(num_experts, _BLOCK) <= _MOST_PAIRS * _BLOCK and sums_by_kernel(device)


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
