"""Activations between a GPU and the host through pinned memory, as nodes of autograd: to the experts and back.

In: tensors on any device. Out: rows in host memory, and rows on a device; gradients return the same way. Pinned blocks
come from torch's cache: a layer reuses those that the layer before it released, unless autograd still needs them. On
the CPU nothing is pinned, and a single piece is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ktc.model.experts.trained.lora import ExpertsLora

Compute = Callable[[Tensor, Tensor, Tensor, ExpertsLora], Tensor]


class HostBackend:
    """The members that all backends on the host share."""

    __slots__ = ()

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def prepare(self) -> None:
        """Do nothing: the weights are already there."""


def on_host(compute: Compute, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
    """Call `compute` with tensors and factors in host memory; return its output on the device of hidden states.

    Training moves megabytes each time, so states and gradients that come from a GPU go through pinned memory.
    """
    lora = lora.on(torch.device("cpu"))
    if x_TH.is_cuda and x_TH.requires_grad and not torch.compiler.is_compiling():
        x, index, weights = (to_host((tensor,)) for tensor in (x_TH, index_TK, weights_TK))
        return to_device(pinned(compute(x, index, weights, lora)), x_TH.device)
    return compute(x_TH.cpu(), index_TK.cpu(), weights_TK.cpu(), lora).to(x_TH.device)


def to_host(pieces: Sequence[Tensor]) -> Tensor:
    """Join the rows of `pieces` (one dtype, equal widths) in host memory."""
    if len(pieces) == 1 and pieces[0].device.type == "cpu":
        return pieces[0]
    return cast("Tensor", _ToHost.apply(*pieces))


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    """Copy rows to `device`, as a rule from host memory. Their gradient comes back to where they were."""
    if rows.device == device:
        return rows
    return cast("Tensor", _ToDevice.apply(rows, device))


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *pieces: Tensor) -> Tensor:
        ctx.places = [(piece.shape[0], piece.device) for piece in pieces]
        return _gathered(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = _pinned(grad) if any(device.type == "cuda" for _, device in ctx.places) else grad
        parts = torch.split(rows, [count for count, _ in ctx.places])
        return tuple(part.to(device, non_blocking=True) for part, (_, device) in zip(parts, ctx.places, strict=True))


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, device: torch.device) -> Tensor:
        ctx.source = rows.device
        return rows.to(device, non_blocking=device.type != "cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (_gathered((grad,)) if ctx.source.type == "cpu" else grad.to(ctx.source)), None


def _gathered(pieces: Sequence[Tensor]) -> Tensor:
    """Copy the rows to new host memory, and wait for the copies."""
    devices = {piece.device for piece in pieces if piece.device.type == "cuda"}
    shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    host = torch.empty(shape, dtype=pieces[0].dtype, pin_memory=bool(devices))
    for part, piece in zip(torch.split(host, [piece.shape[0] for piece in pieces]), pieces, strict=True):
        part.copy_(piece, non_blocking=True)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return host


def pinned(rows: Tensor) -> Tensor:
    """Return `rows` in pinned memory, which a GPU copies beside other work. For autograd they are the same rows."""
    return cast("Tensor", _Pinned.apply(rows))


class _Pinned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _pinned(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def parts(rows: Tensor, sizes: Sequence[int], *, pin: bool) -> tuple[Tensor, ...]:
    """Cut `rows` in host memory into `sizes`, pinned where a GPU is to copy them; their gradients meet in one block."""
    return cast("tuple[Tensor, ...]", _Parts.apply(rows, list(sizes), pin))


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], pin: bool) -> tuple[Tensor, ...]:
        ctx.pin = pin
        return tuple(torch.split(_pinned(rows) if pin else rows.clone(), sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # pinned blocks are used again, where fresh memory of this size costs a page fault for each 4 KiB
        shape = (sum(grad.shape[0] for grad in grads), *grads[0].shape[1:])
        whole = torch.empty(shape, dtype=grads[0].dtype, pin_memory=ctx.pin)
        return torch.cat(grads, out=whole), None, None


def _pinned(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
