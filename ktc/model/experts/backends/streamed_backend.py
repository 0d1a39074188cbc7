"""The streamed backend: a layer's experts on GPUs for many tokens, from the packed weights in host memory.

For thousands of tokens, a GPU saves more time than it takes to send all experts of a layer. Experts come in chunks, and
each matrix of a chunk is multiplied in one grouped product: two forward, three backward, and those of LoRA.
Several GPUs share a layer's experts: each receives its own through its own bus and multiplies them for all tokens. They
are of one process, or each of a process of its own (`shared_experts.py`).
Forward saves its input alone, in host memory. Backward sends the weights again and computes gate and up again. The
gradient of a routing weight is <h, dh>, with h the input of down and dh its gradient before the weight, so that the
outputs of down are not computed again.
Out: the output of the kernel, in the GPU's rounding. Refused: as `ExpertStream`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.gpu.slots import Rows, Slots
from ktc.model.experts.host.saved_on_host import SavedOnHost, saves_in_place, saves_products
from ktc.model.experts.kept.kept_experts import KeptLayer
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.products.chunk_products import ChunkProducts
from ktc.model.experts.products.packed_layout import Matrices
from ktc.model.experts.products.row_check import check_trained_rows
from ktc.model.experts.streamed.expert_stream import ExpertStream, expert_stream
from ktc.model.experts.streamed.shared_experts import Exchange, Sharing
from ktc.model.experts.streamed.stream_sizes import DEFAULT_BUFFER
from ktc.model.experts.trained.host_factors import Parameters, add_gradients, on_device, parameters_on_host
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.trained.lora_dropout import Drop
from ktc.model.kernels.form import ExpertsForm


@dataclass(frozen=True, slots=True)
class Streamed:
    """The experts of `packed` on `devices`, each with a ring of `buffer` bytes. Results are on the first of them.

    Weights that are `resident` are sent once and stay. Experts that are `kept` there are not sent. With `sharing`, the
    processes of a machine share those that are sent.
    """

    packed: PackedExperts
    form: ExpertsForm
    devices: tuple[torch.device, ...]
    buffer: int = DEFAULT_BUFFER
    resident: bool = False
    kept: KeptLayer | None = None
    sharing: Sharing | None = None

    @property
    def device(self) -> torch.device:
        """The device that results are on."""
        return self.devices[0]

    @never_traced
    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`."""
        out_TH = compute(self._streams(), x_TH.to(self.packed.dtype), index_TK, weights_TK, lora, self._shared)
        return out_TH.to(x_TH.device, x_TH.dtype)

    def _streams(self) -> tuple[ExpertStream, ...]:
        experts, count = self.packed.sizes.num_experts, len(self.devices)
        bounds = [experts * number // count for number in range(count + 1)]
        shares = [range(first, end) for first, end in itertools.pairwise(bounds)]
        if (shared := self._shared) is not None:
            shares = [shared.share(experts)]
        streams = tuple(
            expert_stream(self.packed, self.form, device, self.buffer, share, resident=self.resident)
            for device, share in zip(self.devices, shares, strict=True)
            if share
        )
        for stream in streams:
            is_there = self.kept is not None and self.kept.store.device == stream.device
            stream.is_near(self.kept if is_there else None)
        return streams

    @property
    def _shared(self) -> Sharing | None:
        """The processes that share the experts in this call."""
        one = self.sharing
        shares = one is not None and one.on and one.size <= self.packed.sizes.num_experts
        return one if shares and not self.resident and len(self.devices) == 1 else None

    def prepare(self) -> None:
        """See `ExpertsBackend.prepare`."""
        for stream in self._streams():
            stream.prepare()

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: forward saves only hidden states."""
        return 0


def compute(
    streams: Sequence[ExpertStream], x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora,
    sharing: Sharing | None = None,
) -> Tensor:  # fmt: skip
    """Compute the layer's output on the first stream's device, differentiable in hidden states, weights and factors.

    `(T, H), (T, K) int64, (T, K) -> (T, H)`, each on any device. Raises `IndexError` for an expert that does not exist.
    With `sharing`, the stream has the experts of this process alone.
    """
    if torch.is_grad_enabled() or any(lora.products):
        for stream in streams:
            check_trained_rows(stream.form, stream.device)
    home = streams[0].device
    x, weights, index = (tensor.to(home) for tensor in (x_TH, weights_TK, index_TK))
    on_host = parameters_on_host(lora) if home.type == "cuda" else None
    tensors = index, x, weights, *(lora if on_host else lora.on(home)).factors
    with torch.autocast(home.type, enabled=False):  # as the kernel, which computes in the experts' dtype
        exchange = None if sharing is None else sharing.exchange(len(x), home)
        call = _Call(tuple(streams), lora.scales, lora.drop, on_host, torch.is_grad_enabled(), exchange)
        return cast("Tensor", _StreamedExperts.apply(call, *tensors))


@dataclass(frozen=True, slots=True)
class _Call:
    """Everything of a call but its tensors. With `on_host`, factors are views of these parameters in host memory.

    They are sent to the device in both passes, and their gradients are added there.
    """

    streams: tuple[ExpertStream, ...]
    scales: tuple[float, float]
    drop: Drop | None
    on_host: Parameters | None
    keeps: bool
    exchange: Exchange | None = None

    @property
    def is_of_one(self) -> bool:
        """Whether one device of one process computes the call: its sums are the results."""
        return len(self.streams) == 1 and self.exchange is None

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes that share the experts."""
        return rows if self.exchange is None else self.exchange.gathered(rows)

    def own(self, terms: Tensor) -> Tensor:
        """Return this process's rows, summed over all that share the experts."""
        return terms if self.exchange is None else self.exchange.own(terms)

    def lora(self, factors: Sequence[Tensor | None], device: torch.device, *, in_backward: bool) -> ExpertsLora:
        """Return the factors on a device for one of the call's passes."""
        lora = ExpertsLora.of(factors, self.scales, self.drop)
        return lora if self.on_host is None else on_device(lora, device, in_backward=in_backward)


class _StreamedExperts(torch.autograd.Function):
    """Forward keeps hidden states (in host memory), routing and factors, and none of its results."""

    @staticmethod
    def forward(ctx: Any, call: _Call, index: Tensor, x: Tensor, weights: Tensor, *factors: Tensor | None) -> Tensor:
        every, weights = call.gathered(x), call.gathered(weights)
        slots = Slots.of(call.gathered(index), call.streams[0].num_experts)
        lora = call.lora(factors, x.device, in_backward=False)
        stays = call.keeps and saves_in_place() and call.is_of_one and call.on_host is None
        shares = [
            _Share(stream, slots, every, weights, lora, alone=call.is_of_one, keeps_first=stays and saves_products())
            for stream in call.streams
        ]
        out = call.own(_sum([share.forward() for share in shares]))
        ctx.call, ctx.slots, ctx.shares = call, slots, None
        if call.keeps and any(ctx.needs_input_grad):
            ctx.shares = shares if stays else None  # with the factors in the dtype of the rows
            ctx.x = SavedOnHost(x)
            ctx.save_for_backward(weights, *factors)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, *factors = ctx.saved_tensors
        call = cast("_Call", ctx.call)
        x, grad = call.gathered(cast("SavedOnHost", ctx.x).back()), call.gathered(grads[0])
        shares, ctx.shares = cast("list[_Share] | None", ctx.shares), None
        if shares is None:
            lora = call.lora(factors, x.device, in_backward=True)
            shares = [_Share(stream, ctx.slots, x, weights, lora, alone=call.is_of_one) for stream in call.streams]
        gradients = [share.backward(grad) for share in shares]
        d_x, d_weights = (_sum(list(parts)) for parts in zip(*gradients, strict=True))
        d_factors = [_sum(list(parts)) for parts in zip(*(share.gradients for share in shares), strict=True)]
        if call.on_host is not None:
            add_gradients(call.on_host, factors, tuple(d_factors))
            d_factors = [None] * len(d_factors)
        d_weights = call.own(d_weights.view_as(weights)).to(weights.dtype)
        return None, None, call.own(d_x).to(x.dtype), d_weights, *d_factors


class _Share:
    """The experts of one stream in one call, on their device."""

    def __init__(
        self, stream: ExpertStream, slots: Slots, x: Tensor, weights: Tensor, lora: ExpertsLora, *, alone: bool,
        keeps_first: bool = False,
    ) -> None:  # fmt: skip
        self._stream, self._run, self._alone = stream, stream.share, alone
        self._slots = slots.to(stream.device)
        self._x = x.to(stream.device, non_blocking=True)
        self._sums = torch.float64 if x.dtype == torch.float64 else torch.float32
        self._weights = weights.to(stream.device, self._sums, non_blocking=True)
        self._products = ChunkProducts(stream.form, lora.on(stream.device), x.dtype, keeps_first=keeps_first)

    def forward(self) -> Tensor:
        """Return the share's part of the output, (T, H)."""
        y = _OfSlots(*self._slots.span(self._run))
        for run, matrices in self._chunks():
            rows = self._slots.of_experts(run)
            y.put(rows, self._products.forward(self._x, rows, run, matrices))
        return self._slots.sums(y.of(self._x), self._run, self._sums, self._weights, rounded=self._alone)

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the share's part of the gradients of hidden states (T, H) and of routing weights (T K,)."""
        grad = grad.to(self._stream.device, self._x.dtype, non_blocking=True)
        flat = self._weights.flatten()
        d_flat, d_slots = torch.zeros_like(flat), _OfSlots(*self._slots.span(self._run))
        for run, matrices in self._chunks(reverse=True):
            rows = self._slots.of_experts(run)
            d_rows, d_weights = self._products.backward(self._x, grad, flat[rows.pairs], rows, run, matrices)
            d_flat[rows.pairs] = d_weights  # each pair once
            d_slots.put(rows, d_rows)
        return self._slots.sums(d_slots.of(self._x), self._run, self._sums, rounded=self._alone), d_flat

    def _chunks(self, *, reverse: bool = False) -> Iterator[tuple[range, Matrices]]:
        """Yield runs of neighbours with their matrices; those of many rows in parts."""
        at_once = self._stream.is_one_chunk and self._slots.are_of(self._run)
        for run, matrices in self._stream.chunks(self._run if at_once else self._slots.chosen, reverse=reverse):
            parts = self._slots.parts(run, self._stream.most_rows)
            for part in parts:
                whole = len(part) == len(run)
                yield part, matrices if whole else matrices.of(slice(part.start - run.start, part.stop - run.start))

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of LoRA's factors, for all experts; zero outside of the share."""
        return self._products.gradients


@dataclass(slots=True)
class _OfSlots:
    """A row for each slot from `first` until before `end`, put together from the rows of chunks.

    The rows of a single chunk are not copied.
    """

    first: int
    end: int
    _rows: Tensor | None = None

    def put(self, rows: Rows, values: Tensor) -> None:
        """Put the rows of a chunk (S, H) to their slots."""
        if len(values) == self.end - self.first:
            self._rows = values
            return
        if self._rows is None:
            self._rows = values.new_empty((self.end - self.first, values.shape[1]))
        self._rows[rows.first - self.first : rows.end - self.first] = values

    def of(self, x: Tensor) -> Tensor:
        """Return all rows, as wide as those of `x`; without a slot there are none."""
        return x.new_empty((0, x.shape[1])) if self._rows is None else self._rows


def _sum(parts: list[Any]) -> Any:
    """Add the results of the devices, in their order, on the first of them."""
    total = parts[0]
    for part in parts[1:]:
        total = total if part is None else total + part.to(total.device)
    return total
