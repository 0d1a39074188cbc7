"""Factors of LoRA in page-locked host memory, of experts that a GPU multiplies.

In: a layer's factors as views of parameters, and gradients on the GPU. Out: the factors there in both passes, and the
gradients of the parameters in page-locked memory. No values stay on the GPU from forward to backward. Factors are sent
ahead of their use, because a copy that is due would queue behind the weights that were sent ahead. The host does not
wait for a layer's gradients: it waits at the end of the backward pass. All of this holds inside `one_pass`, in which
nothing else changes or adds to these parameters; a hook on such a parameter is not called.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Final, cast

import torch
from torch import Tensor

from ktc.model.experts.private_api import at_end_of_backward, version_of
from ktc.model.experts.trained.lora import ExpertsLora, Lora

Parameters = tuple[Tensor | None, ...]
_AHEAD: Final = 3  # layers whose factors are sent ahead: a ring of weights holds about as many
_MOST_AHEAD: Final = 256 << 20  # bytes of them, beyond which one layer is sent ahead


_inside: Final = ContextVar("_inside", default=False)


@contextmanager
def one_pass() -> Generator[None]:
    """Use factors in host memory as this module says, in a forward and its backward inside the context."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)
        for sender in _senders.values():
            sender.drop()


def parameters_on_host(lora: ExpertsLora) -> Parameters | None:
    """Return the parameter that each of a layer's four factors is a view of, None for a product without LoRA.

    None for all of them together outside of `one_pass`, or unless each is a trained leaf in page-locked memory: factors
    that were joined or converted have values of their own.
    """
    if not _inside.get():
        return None
    parameters: list[Tensor | None] = []
    for product in lora.products:
        if product is None:
            parameters += (None, None)
        else:
            parameters += (_parameter(product, side) for side in (product.a, product.b))
    wanted = [factor for factor in lora.factors if factor is not None]
    return tuple(parameters) if wanted and len(wanted) == sum(leaf is not None for leaf in parameters) else None


def _parameter(lora: Lora, factor: Tensor) -> Tensor | None:
    if factor.device.type != "cpu" or not factor.is_pinned():
        return None
    memory = factor.untyped_storage().data_ptr()
    views = (leaf for leaf in lora.parameters if leaf.untyped_storage().data_ptr() == memory)
    return next((leaf for leaf in views if leaf.is_leaf and leaf.requires_grad), None)


def on_device(lora: ExpertsLora, device: torch.device, *, in_backward: bool) -> ExpertsLora:
    """Return the factors of a layer on a device, for one of its two passes, with those of the next passes underway."""
    if device not in _senders:
        _senders[device] = _Sender(device)
    values = _senders[device].take(_Use.of(lora.factors, in_backward=in_backward))
    return ExpertsLora.of(values, lora.scales, lora.drop)


def forget() -> None:
    """Forget which use follows which, and with it the factors: their parameters move or end."""
    _senders.clear()


@dataclass(frozen=True, slots=True)
class _Use:
    """A layer's factors in one of its passes. Uses of the same memory in the same pass are equal."""

    factors: tuple[Tensor | None, ...]
    key: tuple[int, ...]

    @classmethod
    def of(cls, factors: Sequence[Tensor | None], *, in_backward: bool) -> _Use:
        detached = tuple(factor if factor is None else factor.detach() for factor in factors)
        return cls(detached, (int(in_backward), *(0 if factor is None else factor.data_ptr() for factor in detached)))

    @property
    def nbytes(self) -> int:
        return sum(factor.nbytes for factor in self.factors if factor is not None)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Values that are on a device once `arrived` is; None: they are."""

    values: tuple[Tensor | None, ...]
    arrived: torch.cuda.Event | None


class _Sender:
    """The copies of factors to one GPU. It learns which use follows which: in each pass it is the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._following: dict[tuple[int, ...], _Use] = {}
        self._last: _Use | None = None
        self._sent: dict[tuple[int, ...], _Sent] = {}  # ahead of their use, the earliest first

    def take(self, use: _Use) -> tuple[Tensor | None, ...]:
        """Return values that the device's current stream may read, and send those of the uses that follow."""
        sent = self._sent.pop(use.key, None) or self._send(use)
        if self._last is not None:
            self._following[self._last.key] = use
        self._last = use
        self._send_following(use)
        if sent.arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent.arrived)
            for value in sent.values:
                if value is not None:
                    value.record_stream(current)
        return sent.values

    def drop(self) -> None:
        """Drop what was sent ahead: an optimizer is about to change it."""
        self._sent.clear()
        self._last = None

    def _send_following(self, use: _Use) -> None:
        ahead = _AHEAD if _AHEAD * use.nbytes <= _MOST_AHEAD else 1
        for _ in range(ahead):
            following = self._following.get(use.key)
            if following is None:
                break
            use = following
            if use.key not in self._sent:
                self._sent[use.key] = self._send(use)
        while len(self._sent) > ahead:  # those that did not come
            self._sent.pop(next(iter(self._sent)))

    def _send(self, use: _Use) -> _Sent:
        if self._stream is None:
            return _Sent(use.factors, None)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            values = tuple(
                factor if factor is None else factor.to(self._device, non_blocking=True) for factor in use.factors
            )
            arrived.record(self._stream)
        return _Sent(values, arrived)


_senders: Final[dict[torch.device, _Sender]] = {}


def add_gradients(parameters: Sequence[Tensor | None], factors: Sequence[Tensor | None], gradients: Parameters) -> None:
    """Add the gradients of `factors`, on a device, to those of their `parameters` in host memory.

    Only backward may call this: values are complete at its end. A later gradient is added on the device, which is sent
    the earlier ones for that.
    """
    for parameter, factor, gradient in zip(parameters, factors, gradients, strict=True):
        if parameter is None or factor is None or gradient is None:
            continue
        total = _gradient_of(parameter)
        before = parameter.grad is not None
        parameter.grad = total
        offset = total.storage_offset() + factor.storage_offset() - parameter.storage_offset()
        same = total.as_strided(factor.shape, factor.stride(), offset)
        if gradient.device.type != "cuda":
            added = same + gradient if before else gradient
            same.copy_(added)
            _note_norm(parameter, factor, added)
            continue
        stream = _stream(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            added = gradient + same.to(gradient.device, non_blocking=True) if before else gradient
            same.copy_(added, non_blocking=True)
            _note_norm(parameter, factor, added)
        gradient.record_stream(stream)
        at_end_of_backward(stream.synchronize)


_NORM: Final = "_ktc_norm"  # an attribute of a gradient in host memory


def _note_norm(parameter: Tensor, factor: Tensor, values: Tensor) -> None:
    """Keep the norm of a parameter's new gradient, whose values are on the device: the host would read all of them."""
    assert parameter.grad is not None, "it was written"
    whole = factor.numel() == parameter.numel()
    norm = cast("Tensor", torch.linalg.vector_norm(values)) if whole else None
    if norm is not None and norm.is_cuda:
        norm.record_stream(torch.cuda.default_stream(norm.device))
    vars(parameter.grad)[_NORM] = None if norm is None else (norm, version_of(parameter.grad))


def norm_of(gradient: Tensor) -> Tensor | None:
    """Return the norm of a gradient as `add_gradients` has written it, on a device.

    None for others, and after changes that autograd sees.
    """
    norm, version = vars(gradient).get(_NORM) or (None, 0)
    return norm if version == version_of(gradient) else None


def _gradient_of(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient, or memory for it without values, page-locked if that can be had."""
    if parameter.grad is not None:
        return parameter.grad
    try:
        return torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, pin_memory=parameter.is_pinned()
        )
    except RuntimeError:  # as by a limit of the system: each copy to it waits
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of these copies: another direction of the bus than that of weights."""
    return torch.cuda.Stream(device)
