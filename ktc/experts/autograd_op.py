"""`ktc::fused_moe`: a layer's routed experts as a registered operator, with its backward and its shapes without data.

In: the packed weights as bytes, hidden states, the router's choice, factors of LoRA, and the key of a kernel
(`PackedExperts.key`), which says all that tensors do not. Out: the layer's output, and what backward reads of it.
So `torch.compile` traces through the experts as through any operator. Refused: a second derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from ktc.experts.lora import ExpertsLora, Lora, NativeFactors
from ktc.experts.packed import NO_FACTORS, Factors, PackedExperts

_REST: Final = (
    "Tensor? first_a, Tensor? first_b, Tensor? down_a, Tensor? down_b, "
    "str kernel, float first_scale, float down_scale, bool interleaved, bool keep"
)
_FORWARD: Final = f"(Tensor packed, Tensor x, Tensor index, Tensor weights, {_REST}) -> (Tensor, Tensor)"
_BACKWARD: Final = (
    f"(Tensor packed, Tensor grad, Tensor? x, Tensor index, Tensor weights, Tensor saved, {_REST})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class _Rest(NamedTuple):
    """What follows the first tensors of either operator: factors of LoRA, or `None`, and what is no tensor."""

    first_a: Tensor | None
    first_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    kernel: str
    first_scale: float
    down_scale: float
    interleaved: bool
    keep: bool

    @property
    def lora(self) -> ExpertsLora:
        first = down = None
        if self.first_a is not None and self.first_b is not None:
            first = Lora(self.first_a, self.first_b, self.first_scale)
        if self.down_a is not None and self.down_b is not None:
            down = Lora(self.down_a, self.down_b, self.down_scale)
        return ExpertsLora(first, down)

    @property
    def ranks(self) -> tuple[int, int]:
        """Of the first product and of down, 0 without LoRA."""
        first, down = (0 if each is None else int(each.rank) for each in self.lora.products)
        return first, down

    def factors(self, *, gradients: bool) -> Factors:
        return native_factors(self.lora, PackedExperts.named(self.kernel), self.interleaved, gradients=gradients)


def fused_moe(
    experts: PackedExperts,
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    lora: ExpertsLora,
    *,
    interleaved: bool,
    keep: bool,
) -> Tensor:
    """The layer's output, differentiable in hidden states, routing weights and factors; contiguous CPU tensors.

    `keep`: forward saves gate and up of every slot for backward, which else computes them again.
    """
    first, down = (1.0 if each is None else each.scale for each in lora.products)
    rest = (*lora.factors, experts.key, first, down, interleaved, keep)
    return torch.ops.ktc.fused_moe(experts.packed, x_TH, index_TK, weights_TK, *rest)[0]


def native_factors(lora: ExpertsLora, experts: PackedExperts, interleaved: bool, *, gradients: bool) -> Factors:
    """The factors as the kernel reads them; with accumulators for their gradients where it is to make them."""
    if lora.first is None and lora.down is None:
        return NO_FACTORS
    first, down = (
        NativeFactors.of(each, experts.weight_dtype, interleaved, gradients=gradients) if each else None
        for each in lora.products
    )
    return first, down


def _forward(packed: Tensor, x: Tensor, index: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    rest = _Rest(*arguments)
    experts = PackedExperts.named(rest.kernel).holding(packed)
    out, saved = experts.forward(x, index, weights, save=rest.keep, lora=rest.factors(gradients=False))
    return out, _no_bytes(x) if saved is None else saved


def _forward_shapes(packed: Tensor, x: Tensor, index: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    rest = _Rest(*arguments)
    saved = x.shape[0] * PackedExperts.named(rest.kernel).saved_bytes(*rest.ranks) if rest.keep else 0
    return torch.empty_like(x), x.new_empty(saved, dtype=torch.uint8)


def _backward(
    packed: Tensor,
    grad: Tensor,
    x: Tensor | None,
    index: Tensor,
    weights: Tensor,
    saved: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    rest = _Rest(*arguments)
    factors = rest.factors(gradients=True)
    kept = saved if rest.keep else None
    experts = PackedExperts.named(rest.kernel).holding(packed)
    found = experts.backward(grad.contiguous(), index, weights, saved=kept, x_TH=x, lora=factors)
    return (*found, *_of_factors([None if each is None else each.gradients for each in factors], grad))


def _backward_shapes(
    packed: Tensor,
    grad: Tensor,
    x: Tensor | None,
    index: Tensor,
    weights: Tensor,
    saved: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    rest = _Rest(*arguments)
    dtype = PackedExperts.named(rest.kernel).weight_dtype
    made = [None if each is None else _gradient_shapes(each, dtype) for each in rest.lora.products]
    return (grad.new_empty(grad.shape), torch.empty_like(weights), *_of_factors(made, grad))


def _gradient_shapes(lora: Lora, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of A, and of B as PEFT stores it: the experts last."""
    num_experts, outputs, rank = lora.b.shape
    b = lora.b.new_empty((outputs, rank, num_experts), dtype=dtype).permute(2, 0, 1)
    return lora.a.new_empty(lora.a.shape, dtype=dtype), b


def _of_factors(gradients: Sequence[tuple[Tensor, Tensor] | None], like: Tensor) -> tuple[Tensor, ...]:
    """Four gradients. Of a factor that is not there it is empty, since an operator returns tensors only."""
    return tuple(tensor for each in gradients for tensor in (each or (like.new_empty(0), like.new_empty(0))))


def _no_bytes(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.uint8)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, x, index, weights, *arguments = inputs
    rest = _Rest(*arguments)
    # Else backward is given zeros as the gradient of the saved bytes: as many megabytes, made anew in every call.
    ctx.set_materialize_grads(False)
    needs_x = not rest.keep or any(rest.ranks)
    ctx.save_for_backward(x if needs_x else None, index, weights, output[1], *rest[:4])
    # Not among the saved tensors: a hook that copies those, to offload them, would copy all the layer's experts.
    ctx.packed, ctx.settings = packed, rest[4:]


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # what forward saved was asked for, and nothing else
        return (None,) * (8 + len(ctx.settings))
    others = ctx.saved_tensors
    factors = others[4:]
    grad_x, grad_weights, *found = torch.ops.ktc.fused_moe_backward(ctx.packed, grad, *others, *ctx.settings)
    of_factors = (None if factor is None else each for factor, each in zip(factors, found, strict=True))
    return None, grad_x, None, grad_weights, *of_factors, *[None] * len(ctx.settings)


def _refuse_second(*_: object) -> NoReturn:
    raise RuntimeError("the experts' kernels have a first derivative only; `create_graph` cannot reach through them")


def _register() -> None:
    """Once per process. The operators take CPU tensors: a module brings its inputs there."""
    forward = torch.library.custom_op("ktc::fused_moe", _forward, mutates_args=(), device_types="cpu", schema=_FORWARD)
    forward.register_fake(_forward_shapes)
    forward.register_autograd(_differentiate, setup_context=_save)
    name = "ktc::fused_moe_backward"
    backward = torch.library.custom_op(name, _backward, mutates_args=(), device_types="cpu", schema=_BACKWARD)
    backward.register_fake(_backward_shapes)
    backward.register_autograd(_refuse_second)


_register()
