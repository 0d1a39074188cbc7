"""Tensors that backward needs, kept in host memory from forward to backward.

In: a tensor on any device. Out: the same values there, when backward needs them. Both copies run beside the GPU's other
work. Backward needs tensors in the reverse of forward's order, so some that were saved earlier are fetched with each
one. On the CPU nothing is copied.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.foundation.temporary_values import context_value

# Tensors that are fetched before they are due: those of a layer in one chunk, and of several chunks up to these bytes.
_AHEAD, _MOST, _BYTES_AHEAD = 5, 32, 160 << 20


# Whether products stay too; None outside of contexts. Forward alone reads it, in the thread that called it.
_in_place: Final[ContextVar[bool | None]] = ContextVar("_in_place", default=None)


def saved_in_place(*, products: bool = False) -> AbstractContextManager[bool | None]:
    """Leave tensors that are saved inside the context where they are: their GPU has room for them.

    With `products`, it has room for gate and up of experts too, which backward would compute again.
    """
    return context_value(_in_place, products)


def saves_in_place() -> bool:
    """Return whether tensors that are saved now stay where they are."""
    return _in_place.get() is not None


def saves_products() -> bool:
    """Return whether gate and up that are computed now stay for backward."""
    return bool(_in_place.get())


class SavedOnHost:
    """One tensor, which is not copied in `saved_in_place`. `back` may be called again, as for a retained graph."""

    def __init__(self, saved: Tensor) -> None:
        self._device = saved.device
        self._is_due = True  # until it was taken
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None
        self._stays = saved.device.type != "cuda" or saves_in_place()
        if self._stays:
            self._host, self._before = saved, None
            return
        lane = _lane(saved.device)
        self._host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True)
        lane.copy(saved, self._host)
        saved.record_stream(lane.stream)
        self._before = lane.last
        lane.last = weakref.ref(self)

    def back(self) -> Tensor:
        """Return the tensor on its device, and begin to fetch those that were saved before it."""
        if self._stays:
            return self._host
        self._fetch()
        self._is_due = False
        self._fetch_before()
        assert self._coming is not None
        (fetched, arrived), self._coming = self._coming, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        fetched.record_stream(current)
        return fetched

    def _fetch_before(self) -> None:
        """Begin to fetch the tensors that are due next."""
        before, ahead = self._before and self._before(), 0
        for number in range(_MOST):
            if before is None or (number >= _AHEAD and ahead >= _BYTES_AHEAD):
                return
            if before._is_due:
                before._fetch()
                ahead += before._host.nbytes
            before = before._before and before._before()

    def _fetch(self) -> None:
        if self._coming is None:
            lane = _lane(self._device)
            with torch.cuda.stream(lane.stream):  # whose memory it is, so that nothing else waits for it
                target = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            self._coming = target, lane.copy(self._host, target)


class _Lane:
    """The stream of such copies of one GPU, and the tensor that was saved last."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.last: weakref.ref[SavedOnHost] | None = None

    def copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        """Copy after the work that the current stream has now."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self.stream)
        return arrived


@functools.cache
def _lane(device: torch.device) -> _Lane:
    return _Lane(device)


class HostOffloaded:
    """A tensor that autograd carries as a placeholder without memory, and whose values are kept in host memory.

    The first `uses` calls of `values` return those of the device, which is then free of them. They come back from the
    host for as many calls.
    """

    def __init__(self, tensor: Tensor, uses: int = 1) -> None:
        self._now: Tensor | None = tensor.detach()
        self._uses, self._used = uses, 0
        self._kept = SavedOnHost(self._now) if tensor.requires_grad else None
        self.placeholder = cast("Tensor", _Placeholder.apply(tensor))

    def values(self, placeholder: Tensor) -> Tensor:
        """Return the tensor as a function of its placeholder, the same values each time."""
        return cast("Tensor", _Values.apply(placeholder, self))

    def take(self) -> Tensor:
        """Return the values, detached."""
        if self._kept is None:
            assert self._now is not None
            return self._now
        values = self._kept.back() if self._now is None else self._now
        self._used += 1
        self._now = None if self._used % self._uses == 0 else values
        return values


class _Placeholder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, parked: HostOffloaded) -> Tensor:
        return parked.take().view_as(placeholder)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
