"""The seconds of each kind of work in a stacked step, while someone listens; otherwise a span costs one comparison.

In: spans around attention, routers and what else a layer computes, its experts, the head with its loss, forward and
backward. Out: the seconds of each kind in a step. On a GPU they are those between two events of its stream, for which
nothing waits before the step's end: work stays beside other work, and a gap in which the GPU waits for Python belongs
to the span in which it falls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor

PartKind = Literal["attention", "mlp", "experts", "lm_head", "optimizer"]
Moment = float | torch.cuda.Event
_UNTIMED: Final = nullcontext()


def moment(device: torch.device) -> Moment:
    """Return this moment on a device: an event of its stream, on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_gpus() -> None:
    """Wait until the events of every GPU have their times."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def seconds_between(began: Moment, ended: Moment) -> float:
    """Return the seconds between two moments of one device, for which the GPU is not waited for."""
    if isinstance(began, torch.cuda.Event):
        return began.elapsed_time(cast("torch.cuda.Event", ended)) / 1e3
    return cast("float", ended) - began


class PartClock:
    """The spans of one step after the other. Backward's may come from a thread of autograd."""

    def __init__(self) -> None:
        self._spans: list[tuple[PartKind, Moment, Moment]] = []

    def add(self, kind: PartKind, began: Moment, ended: Moment) -> None:
        """Add a span between two moments of one device."""
        self._spans.append((kind, began, ended))

    def end_step(self) -> dict[str, float]:
        """Return the seconds of each kind since the last call, after waiting for the GPUs."""
        wait_for_gpus()
        spans, self._spans = self._spans, []
        seconds = defaultdict[str, float](float)
        for kind, began, ended in spans:
            seconds[kind] += seconds_between(began, ended)
        return dict(seconds)


_clocks: Final[list[PartClock]] = []


@contextmanager
def listening(clock: PartClock) -> Generator[None]:
    """Time the steps of this process inside the context. Parts then run one by one that are joined elsewhere."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)


def is_timed() -> bool:
    """Return whether someone listens."""
    return bool(_clocks)


def span(kind: PartKind, device: torch.device) -> AbstractContextManager[None]:
    """Enter this around work of a kind on a device."""
    return _timed(_clocks[-1], kind, device) if _clocks else _UNTIMED


@contextmanager
def _timed(clock: PartClock, kind: PartKind, device: torch.device) -> Generator[None]:
    began = moment(device)
    yield
    clock.add(kind, began, moment(device))


def in_span(kind: PartKind, function: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """Return `function(x, *others)`, whose forward and backward are a span each. Backward's ends at that of `x`."""
    if not _clocks:
        return function(x, *others)
    began: list[Moment] = []
    with span(kind, x.device):
        out = function(_Ends.apply(x, kind, began), *others)
    return cast("Tensor", _Begins.apply(out, began))


class _Begins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, began: list[Moment]) -> Tensor:
        ctx.began = began
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if _clocks:
            ctx.began.append(moment(grad.device))
        return grad, None


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: PartKind, began: list[Moment]) -> Tensor:
        ctx.kind, ctx.began = kind, began
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if _clocks and ctx.began:
            _clocks[-1].add(ctx.kind, ctx.began.pop(), moment(grad.device))
        return grad, None, None
