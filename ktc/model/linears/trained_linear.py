"""`TrainedLinear`: a linear layer whose weight is rounded again after each optimizer step.

The weight trains itself, as a master in fp32 or bf16, or it is frozen and an adapter is added to it before it is
rounded (`merged_lora.py`). The rounded weight is kept until a parameter changes, so the micro-batches of a step share
it. Gradients pass the rounding unchanged (Bengio et al., arXiv:1308.3432).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ktc.diagnostics import InputRefused
from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.trained.lora import Factors
from ktc.model.experts.trained.weight_training import FROZEN, State, WeightTraining, not_rounded, state_of


class _Rounded:
    """A rounded weight, and the state of the parameters that it was made of. A copy of the layer begins without."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.state: tuple[torch.dtype, State] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rounded:
        return _Rounded()


class TrainedLinear(nn.Linear):
    """`(..., in_features) -> (..., out_features)` in the dtype of the input, or of autocast."""

    weight_training: WeightTraining = FROZEN
    fqn: str = "a linear layer"  # its name in the model, from the loader
    kept: _Rounded

    @classmethod
    def from_linear(cls, linear: nn.Linear, training: WeightTraining) -> TrainedLinear:
        """Return a layer with the parameters of `linear`, in the dtype of its masters where it trains."""
        dtype = training.stored_in(linear.weight.dtype)
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=dtype)
        made.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=training.trains)
        bias = cast("Tensor | None", linear.bias)
        of_outputs = None if bias is None else nn.Parameter(bias.detach().to(dtype), training.trains)
        made.register_parameter("bias", of_outputs)
        made.weight_training, made.kept = training, _Rounded()
        return made.train(linear.training)

    def forward(self, input: Tensor, factors: Factors | None = None) -> Tensor:
        """Multiply with the rounded weight; `factors` are merged before it is rounded."""
        return self._product(input, factors)

    @never_traced
    def _product(self, input: Tensor, factors: Factors | None) -> Tensor:
        device = input.device.type
        x = input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input
        weight = self.rounded(x.dtype, factors)
        bias = cast("Tensor | None", self.bias)
        scale, *of_adapters = (1.0, None, None) if factors is None else (factors.scale, factors.a, factors.b)
        with torch.autocast(device, enabled=False):
            return cast("Tensor", _Product.apply(x, weight, bias, self.weight, scale, *of_adapters))

    def rounded(self, dtype: torch.dtype, factors: Factors | None = None) -> Tensor:
        """Return the weight that is multiplied, in `dtype`. Raises `ValueError` for one that is not finite."""
        of_adapters = ((), ()) if factors is None else (factors.parameters, factors.scales)
        state = dtype, state_of((self.weight, *of_adapters[0]), of_adapters[1])
        if self.kept.weight is None or state != self.kept.state:
            self.kept.weight = self._rounded(dtype, factors)
            self.kept.state = state
        return self.kept.weight

    def _rounded(self, dtype: torch.dtype, factors: Factors | None) -> Tensor:
        """Round the sum. Autocast would round the factors, and a later step cannot train with an inference tensor."""
        weight, grid = self.weight.detach(), self.weight_training.grid
        off = torch.autocast(weight.device.type, enabled=False)
        with torch.inference_mode(mode=False), torch.no_grad(), off:
            if factors is not None:
                weight = weight.float() + (factors.b.float() @ factors.a.float()) * factors.scale
            try:
                return (weight if grid is None else grid.rounded(weight)).to(dtype)
            except ValueError as error:
                raise InputRefused(not_rounded(self.fqn, str(error))) from error

    def extra_repr(self) -> str:
        training = self.weight_training
        kept = "merged with the adapter" if training.merged else f"masters in {self.weight.dtype}"
        return f"{super().extra_repr()}, {training.grid or 'not rounded'}, {kept}"


class _Product(torch.autograd.Function):
    """x W^T + b with the rounded W; the gradient of W is that of the master, or is reduced to the factors'."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, master: Tensor, scale: float, *factors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *factors)
        ctx.scale, ctx.master, ctx.bias = scale, master.dtype, None if bias is None else bias.dtype
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, a, b = ctx.saved_tensors
        of_x, _, of_bias, of_master, _, of_a, of_b = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        gradients: list[Tensor | None] = [grad @ weight if of_x else None, None, None, None, None, None, None]
        if of_bias:
            gradients[2] = rows.sum(0, dtype=torch.float32).to(ctx.bias)
        if of_master or of_a or of_b:
            of_weight = rows.t() @ x.reshape(-1, x.shape[-1])
            gradients[3] = of_weight.to(ctx.master) if of_master else None
            if of_a or of_b:
                with torch.autocast(grad.device.type, enabled=False):
                    wide = of_weight.float()
                    gradients[5] = (ctx.scale * (b.float().t() @ wide)).to(a.dtype)
                    gradients[6] = (ctx.scale * (wide @ a.float().t())).to(b.dtype)
        return tuple(gradients)
