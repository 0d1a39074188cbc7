"""`ktc::fused_moe`: a layer's routed experts as a registered operator, with its backward and its shapes without data.

In: the packed weights as bytes, hidden states, the router's choice, factors of LoRA, and the key of a kernel
(`PackedExperts.key`), which has everything else. Out: the layer's output, and the bytes that backward reads.
So `torch.compile` traces through the experts as through any operator. Refused: a second derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.trained.lora_dropout import Drop

_TRAILING: Final = (
    "Tensor? gate_up_a, Tensor? gate_up_b, Tensor? down_a, Tensor? down_b, Tensor? seed, "
    "str kernel, float gate_up_scale, float down_scale, float gate_up_dropout, float down_dropout, "
    "bool interleaved, bool keep"
)
_FACTORS: Final = 4  # tensors of LoRA, first of the trailing arguments
_FORWARD: Final = f"(Tensor packed, Tensor x, Tensor index, Tensor weights, {_TRAILING}) -> (Tensor, Tensor)"
_BACKWARD: Final = (
    f"(Tensor packed, Tensor grad, Tensor? x, Tensor index, Tensor weights, Tensor saved, {_TRAILING})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class _Trailing(NamedTuple):
    """The trailing arguments of both operators: LoRA factors, the seed of dropout (`None`: none), then settings."""

    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    seed: Tensor | None
    kernel: str
    gate_up_scale: float
    down_scale: float
    gate_up_dropout: float
    down_dropout: float
    interleaved: bool
    keep: bool

    @property
    def lora(self) -> ExpertsLora:
        drop = Drop.of(self.seed, self.gate_up_dropout, self.down_dropout)
        return ExpertsLora.of(self[:_FACTORS], (self.gate_up_scale, self.down_scale), drop)

    @property
    def experts(self) -> PackedExperts:
        """The kernel, without weights."""
        return PackedExperts.named(self.kernel)


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
    """Compute the layer's output, differentiable in hidden states, routing weights and factors; contiguous CPU tensors.

    `keep`: forward saves gate and up of every slot for backward, which else computes them again.
    """
    drop = lora.drop
    seed, dropouts = (None, (0.0, 0.0)) if drop is None else (drop.seed, (drop.gate_up, drop.down))
    trailing = (*lora.factors, seed, experts.key, *lora.scales, *dropouts, interleaved, keep)
    return torch.ops.ktc.fused_moe(experts.packed, x_TH, index_TK, weights_TK, *trailing)[0]


def _forward(packed: Tensor, x: Tensor, index: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    trailing = _Trailing(*arguments)
    _require(trailing.experts, packed, index, (x, weights))
    experts, lora, interleaved = trailing.experts.with_bytes(packed), trailing.lora, trailing.interleaved
    out, saved = experts.forward(x, index, weights, save=trailing.keep, lora=lora, interleaved=interleaved)
    return out, x.new_empty(0, dtype=torch.uint8) if saved is None else saved


def _forward_shapes(packed: Tensor, x: Tensor, index: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    trailing = _Trailing(*arguments)
    saved = x.shape[0] * trailing.experts.saved_bytes(*trailing.lora.ranks) if trailing.keep else 0
    return torch.empty_like(x), x.new_empty(saved, dtype=torch.uint8)


def _backward(
    packed: Tensor, grad: Tensor, x: Tensor | None, index: Tensor, weights: Tensor, saved: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    trailing = _Trailing(*arguments)
    grad = grad.contiguous()
    _require(trailing.experts, packed, index, (grad, weights))
    if x is not None:
        _require(trailing.experts, packed, index, (x, weights))
    if trailing.keep and saved.nbytes < grad.shape[0] * trailing.experts.saved_bytes(*trailing.lora.ranks):
        raise ValueError(f"{saved.nbytes} bytes are fewer than forward saves of {grad.shape[0]} tokens")
    grad_x, grad_weights, gradients = trailing.experts.with_bytes(packed).backward(
        grad,
        (index, weights),
        saved=saved if trailing.keep else None,
        x_TH=x,
        lora=trailing.lora,
        interleaved=trailing.interleaved,
    )
    return grad_x, grad_weights, *_returned(gradients, grad)


def _backward_shapes(
    packed: Tensor, grad: Tensor, x: Tensor | None, index: Tensor, weights: Tensor, saved: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    trailing = _Trailing(*arguments)
    gradients = trailing.lora.zeros(trailing.experts.weight_dtype)
    return (grad.new_empty(grad.shape), torch.empty_like(weights), *_returned(gradients, grad))


def _returned(gradients: ExpertsLora, like: Tensor) -> Iterator[Tensor]:
    """Yield four gradients. That of an absent factor is empty, since an operator returns tensors only."""
    return (like.new_empty(0) if gradient is None else gradient for gradient in gradients.factors)


def _require(experts: PackedExperts, packed: Tensor, index: Tensor, rows: tuple[Tensor, Tensor]) -> None:
    """Raise `ValueError` for tensors that the kernel would read beyond their end. Modules pass none; others may.

    `rows` are hidden states or a gradient (T, H), and routing weights (T, K).
    """
    (num_experts, hidden, _, top_k), tokens = experts.sizes, index.shape[0]
    wanted = (
        (index, torch.int64, (tokens, top_k)),
        (rows[0], experts.dtype, (tokens, hidden)),
        (rows[1], experts.weight_dtype, (tokens, top_k)),
    )
    for tensor, dtype, shape in wanted:
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape) or not tensor.is_contiguous():
            layout = f"{tensor.dtype} {tuple(tensor.shape)}, {'' if tensor.is_contiguous() else 'not '}contiguous"
            raise ValueError(f"expected a contiguous tensor of {dtype} {shape}, found {layout}")
    if packed.nbytes < experts.nbytes:
        raise ValueError(f"expected {experts.nbytes} packed bytes of {num_experts} experts, found {packed.nbytes}")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, x, index, weights, *arguments = inputs
    trailing = _Trailing(*arguments)
    # Else every call allocates zeros as the gradient of the saved bytes, which are megabytes.
    ctx.set_materialize_grads(False)
    needs_x = not trailing.keep or any(trailing.lora.ranks)
    ctx.save_for_backward(x if needs_x else None, index, weights, output[1], *trailing[: _FACTORS + 1])
    # Not a saved tensor: a hook that offloads those would copy all experts of the layer.
    ctx.packed, ctx.settings = packed, trailing[_FACTORS + 1 :]


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # only the gradient of the saved bytes is requested
        return (None,) * (4 + _FACTORS + 1 + len(ctx.settings))
    others = ctx.saved_tensors
    factors = others[4 : 4 + _FACTORS]
    grad_x, grad_weights, *grad_factors = torch.ops.ktc.fused_moe_backward(ctx.packed, grad, *others, *ctx.settings)
    of_factors = (None if factor is None else gradient for factor, gradient in zip(factors, grad_factors, strict=True))
    return None, grad_x, None, grad_weights, *of_factors, None, *[None] * len(ctx.settings)


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
