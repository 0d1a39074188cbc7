"""`StreamedLinear`: a frozen linear layer that a GPU computes from weights in host memory, sent in every pass.

In: activations on the GPU. Out: F.linear's result in the dtype of the weights. Forward and backward each send the
weights through the device's ring; nothing of them is kept there. PEFT wraps it as any `nn.Linear`: after `begin` its
`weight` has the shape and the device that PEFT looks for, and no values of its own.
Refused: weights that are on a device.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.streamed.stream_ring import Ring, StreamSource, ring_of
from ktc.model.linears.absent_weight import AbsentWeight, LinearWithoutWeight


class StreamedLinear(LinearWithoutWeight):
    """`(..., in_features) -> (..., out_features)` on `device`, through a ring of `buffer` bytes."""

    device: torch.device
    buffer: int
    source: StreamSource | None = None
    kept: Tensor | None = None
    _ring: Ring | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, device: torch.device, buffer: int) -> StreamedLinear:
        """Return a layer that shares the parameters of `linear`, and computes on the host until `begin`."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        made.weight = linear.weight
        made.register_parameter("bias", linear.bias)
        made.device, made.buffer = device, buffer
        made.loads.loaded_all()
        return made.train(linear.training)

    def begin(self) -> None:
        """Stream from now on. Raises `ValueError` for a weight that is not in host memory."""
        weight = self.weight
        if weight.device.type != "cpu":
            raise ValueError("weights are streamed from host memory")
        self.kept = weight.detach().contiguous()
        storage = self.kept.flatten().view(torch.uint8)
        self.source = StreamSource(storage, (storage,), self)
        del self.weight
        self.__dict__["weight"] = AbsentWeight.of(weight.shape, weight.dtype, self.device)  # unregistered
        bias = self._parameters["bias"]
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().to(self.device), requires_grad=False)

    def copy_from(self, weight: Tensor) -> None:
        """Load the weight (out_features, in_features) into the same memory, after `begin`."""
        assert self.kept is not None, "`begin` comes first"
        self.kept.copy_(weight)
        self.loads.loaded_all()

    def restore(self, name: str) -> None:
        """Await a load into the same memory, and drop pieces that were sent ahead."""
        if self._ring is not None:
            self._ring.forget()
        super().restore(name)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply on the device of the layer."""
        if self.source is None:
            return super().forward(input)
        return self._streamed(input)

    @never_traced
    def _streamed(self, input: Tensor) -> Tensor:
        assert self.kept is not None
        self.loads.require_processed(self.loads.generation)
        x = input.to(self.device, self.kept.dtype)
        with torch.autocast(self.device.type, enabled=False):
            out = cast("Tensor", _Product.apply(x, self))
        bias = self._parameters["bias"]
        return out if bias is None else out + bias

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse (L449): a copy would train, or save, weights that it does not have."""
        message = "a streamed linear layer cannot be copied: its weights are in host memory"
        hint = "leave it out of `modules_to_save`, or out of `place(stream = ...)`"
        raise InputRefused(Diagnostic("L449", message, hint=hint))

    @contextmanager
    def sent(self, *, reverse: bool) -> Generator[Tensor]:
        """Send the weights (out_features, in_features) to the device, for products issued in the context."""
        assert self.kept is not None and self.source is not None, "`begin` comes first"
        self._ring = self._ring or ring_of(self.device, max(self.buffer, self.kept.nbytes))
        with self._ring.visit(self.source, (0,), reverse=reverse) as take:
            yield take(0).view(self.kept.dtype).view(self.kept.shape)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", streamed to {self.device}"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: StreamedLinear) -> Tensor:
        ctx.layer = layer
        with layer.sent(reverse=False) as weight:
            return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer = cast("StreamedLinear", ctx.layer)
        with layer.sent(reverse=True) as weight:
            return grad.to(weight.dtype) @ weight, None
