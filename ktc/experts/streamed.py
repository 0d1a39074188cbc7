"""A layer's experts computed on a GPU for many tokens, from the packed weights in host memory.

A GPU multiplies so much faster than a CPU that with thousands of tokens it pays to send all experts of a layer through
its memory: some at a time, the next ones on their way while these are multiplied. None is kept: a layer takes no more
GPU memory than two chunks of its experts. Forward saves its input alone, in host memory; backward sends the weights
once more and computes gate and up again.
In: packed bytes of a format without codes, on one NUMA node. Out: what the kernel computes, in the GPU's rounding.
Refused: formats with codes or blocks, weights that are cut for several NUMA nodes.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.experts.dense_layout import DenseLayout, Matrices
from ktc.experts.form import ExpertsForm
from ktc.experts.lora import ExpertsLora, Lora
from ktc.experts.packed import PackedExperts
from ktc.experts.reference import check_routing, expert_output

log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 32 << 20  # that one copy sends: enough to fill the bus, little beside a model
_PORTABLE: Final = 1  # of cudaHostRegister: for all contexts of the process


@dataclass(frozen=True, slots=True)
class Prefill:
    """Calls with at least so many tokens are computed on another device than the experts' own."""

    device: torch.device
    tokens: int


class ExpertStream:
    """The experts of one layer, sent to `device` for whoever computes with many of them.

    Raises `ValueError` for weights that have no plain layout.
    """

    def __init__(self, experts: PackedExperts, form: ExpertsForm, device: torch.device) -> None:
        if experts.num_nodes > 1:
            raise ValueError("experts that are cut for several NUMA nodes cannot be sent: compile with `numa = none`")
        self.num_experts, hidden, intermediate, _ = experts.sizes
        self.form, self.device = replace(form, transposed=False), device
        self._layout = DenseLayout(self.form, hidden, intermediate, experts.dtype, experts.weight_dtype)
        self._experts = experts
        self._bytes = experts.nbytes // self.num_experts
        if self._bytes != self._layout.nbytes:
            raise ValueError("experts stored as codes or blocks are multiplied by their kernel alone")

    def each(self, wanted: Sequence[int]) -> Iterator[tuple[int, Matrices]]:
        """The experts `wanted` in ascending order, their matrices on the device."""
        packed, runs = self._experts.packed, _runs(wanted, max(1, _CHUNK_BYTES // self._bytes))
        if self.device.type != "cuda":
            for run in runs:
                yield from self._matrices(run, self._slice(packed, run))
            return
        _page_lock(self._experts, self.device)
        lane = _lane(self.device, max(_CHUNK_BYTES, self._bytes))
        following = lane.send(self._slice(packed, runs[0])) if runs else None
        for number, run in enumerate(runs):
            sent = following
            assert sent is not None
            following = lane.send(self._slice(packed, runs[number + 1])) if number + 1 < len(runs) else None
            yield from self._matrices(run, sent.received())
            sent.release()

    def _slice(self, packed: Tensor, run: range) -> Tensor:
        return packed[run.start * self._bytes : run.stop * self._bytes]

    def _matrices(self, run: range, packed: Tensor) -> Iterator[tuple[int, Matrices]]:
        for place, expert in enumerate(run):
            yield expert, self._layout.matrices(packed[place * self._bytes : (place + 1) * self._bytes])


def compute(stream: ExpertStream, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
    """The layer's output on the stream's device, differentiable in hidden states, routing weights and factors.

    `(T, H), (T, K) int64, (T, K) -> (T, H)`, each on any device. Raises `IndexError` for an expert that does not exist.
    """
    check_routing(index_TK, stream.num_experts)
    moved = (None if factor is None else factor.to(stream.device) for factor in lora.factors)
    x, weights, index = (tensor.to(stream.device) for tensor in (x_TH, weights_TK, index_TK))
    scales = tuple(1.0 if each is None else each.scale for each in lora.products)
    with torch.autocast(stream.device.type, enabled=False):  # as the kernel, which computes in the experts' dtype
        return cast("Tensor", _Streamed.apply(stream, scales, index, x, weights, *moved))


@dataclass(frozen=True, slots=True)
class _Slots:
    """The pairs (token, k) sorted by expert: `tokens` and `pairs` (S,) int64, and where each expert's begin and end."""

    tokens: Tensor
    pairs: Tensor
    spans: dict[int, slice]

    @classmethod
    def of(cls, index_TK: Tensor, num_experts: int) -> _Slots:
        flat = index_TK.flatten()
        pairs = torch.argsort(flat, stable=True)
        spans: dict[int, slice] = {}
        end = 0
        counts = cast("list[int]", torch.bincount(flat, minlength=num_experts).tolist())
        for expert, count in enumerate(counts):
            if count:
                spans[expert] = slice(end, end + count)
            end += count
        return cls(pairs // index_TK.shape[1], pairs, spans)


class _Streamed(torch.autograd.Function):
    """Forward keeps hidden states (in host memory), routing and factors; nothing of what it computed."""

    @staticmethod
    def forward(
        ctx: Any, stream: ExpertStream, scales: tuple[float, float], index: Tensor, x: Tensor, weights: Tensor,
        *factors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        slots = _Slots.of(index, stream.num_experts)
        lora, flat = _lora(factors, scales), weights.flatten().to(_accumulator(x.dtype))
        out = torch.zeros(x.shape, dtype=flat.dtype, device=x.device)
        for expert, matrices in stream.each(tuple(slots.spans)):
            span = slots.spans[expert]
            tokens = slots.tokens[span]
            y = expert_output(stream.form, x.index_select(0, tokens), *matrices, expert, lora)
            out.index_add_(0, tokens, y.to(flat.dtype) * flat[slots.pairs[span], None])
        ctx.stream, ctx.scales, ctx.slots = stream, scales, slots
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(_on_host(x), weights, *factors)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stream, slots = cast("ExpertStream", ctx.stream), cast("_Slots", ctx.slots)
        host_x, weights, *factors = ctx.saved_tensors
        x, (grad,) = host_x.to(stream.device, non_blocking=True), grads
        flat = weights.flatten().to(_accumulator(x.dtype))
        d_x = torch.zeros(x.shape, dtype=flat.dtype, device=x.device)
        d_flat = torch.zeros_like(flat)
        d_factors = [None if factor is None else torch.zeros_like(factor) for factor in factors]
        for expert, matrices in stream.each(tuple(slots.spans)):
            span = slots.spans[expert]
            tokens, pairs = slots.tokens[span], slots.pairs[span]
            with torch.enable_grad():
                rows = x.index_select(0, tokens).requires_grad_()
                own = [None if factor is None else factor[expert, None].requires_grad_() for factor in factors]
                y = expert_output(stream.form, rows, *matrices, 0, _lora(own, ctx.scales))
            d_out = grad.index_select(0, tokens)
            d_flat[pairs] = (y.detach().to(flat.dtype) * d_out).sum(-1)
            wanted = [rows, *(factor for factor in own if factor is not None)]
            d_y = (d_out * flat[pairs, None]).to(y.dtype)
            d_rows, *found = torch.autograd.grad(y, wanted, d_y)
            d_x.index_add_(0, tokens, d_rows.to(flat.dtype))
            for total, part in zip((each for each in d_factors if each is not None), found, strict=True):
                total[expert] = part[0]
        return None, None, None, d_x.to(x.dtype), d_flat.view_as(weights).to(weights.dtype), *d_factors


def _lora(factors: Sequence[Tensor | None], scales: tuple[float, float]) -> ExpertsLora:
    first_a, first_b, down_a, down_b = factors
    first = None if first_a is None or first_b is None else Lora(first_a, first_b, scales[0])
    down = None if down_a is None or down_b is None else Lora(down_a, down_b, scales[1])
    return ExpertsLora(first, down)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _on_host(x: Tensor) -> Tensor:
    """A pinned copy of what is on a GPU, made beside its other work."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _runs(wanted: Sequence[int], most: int) -> list[range]:
    """Neighbours together, at most so many: what one copy sends. Experts that nobody wants are left out."""
    runs: list[range] = []
    for expert in sorted(wanted):
        if runs and runs[-1].stop == expert and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, expert + 1)
        else:
            runs.append(range(expert, expert + 1))
    return runs


_tried: Final[set[tuple[int, int]]] = set()  # address and size of what `_page_lock` was asked for


def _page_lock(experts: PackedExperts, device: torch.device) -> None:
    """Once for a layer's storage: the bus then reads it at full speed, beside what the GPU computes.

    Until the experts are gone: where another model's come to lie at a locked address, the bus would read these.
    """
    place = experts.packed.data_ptr(), experts.packed.nbytes
    if place in _tried:
        return
    _tried.add(place)
    status = int(cast("Any", torch.cuda.cudart()).cudaHostRegister(*place, _PORTABLE))
    if status != 0:
        log.warning("experts could not be page-locked (CUDA error %d): sending them to the GPU is slow", status)
    weakref.finalize(experts, _unlock, place, device if status == 0 else None).atexit = False  # CUDA ends before


def _unlock(place: tuple[int, int], device: torch.device | None) -> None:
    _tried.discard(place)
    if device is not None:
        torch.cuda.synchronize(device)  # what it still copies
        cast("Any", torch.cuda.cudart()).cudaHostUnregister(place[0])


class _Sent:
    """A chunk on its way to one of a lane's places."""

    def __init__(self, place: _Place, chunk: Tensor, arrived: torch.cuda.Event) -> None:
        self._place, self._chunk, self._arrived = place, chunk, arrived

    def received(self) -> Tensor:
        """The chunk, for the current stream."""
        torch.cuda.current_stream(self._chunk.device).wait_event(self._arrived)
        return self._chunk

    def release(self) -> None:
        """What the current stream was given to do is the last that reads the chunk."""
        self._place.free.record(torch.cuda.current_stream(self._chunk.device))


@dataclass(frozen=True, slots=True)
class _Place:
    buffer: Tensor
    free: torch.cuda.Event


class _Lane:
    """Two places on a GPU that chunks come to in turn, and the stream that brings them."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._stream = torch.cuda.Stream(device)
        made = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        self._places = [_Place(buffer, torch.cuda.Event()) for buffer in made]
        for place in self._places:  # its memory was another tensor's, which the current stream may still read
            place.free.record(torch.cuda.current_stream(device))

    def send(self, packed: Tensor) -> _Sent:
        """Begin to copy into the place that was used before the last one, once nobody reads it any more."""
        place = self._places.pop(0)
        self._places.append(place)
        self._stream.wait_event(place.free)
        chunk = place.buffer[: packed.nbytes]
        with torch.cuda.stream(self._stream):
            chunk.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return _Sent(place, chunk, arrived)


@functools.cache
def _lane(device: torch.device, size: int) -> _Lane:
    """One for all layers with experts of a size."""
    return _Lane(device, size)
