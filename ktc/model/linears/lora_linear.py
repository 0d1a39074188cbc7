"""`FusedLinear`: a linear layer that a rule chose for an adapter, a kernel or a grid. PEFT wraps it as any `nn.Linear`.

In: an `nn.Linear`, whose weight and bias it shares. Out: the same function under the same names, by PyTorch's product.
Under the rule `kt_linear`, kernels multiply few rows under `no_grad` (`gemv`) and many rows (`prefill = packed`).
Under `fake_quant` with a frozen base, the loader rounds the weight to the grid once (`round_weight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.checkpoint.reader import bands
from ktc.model.experts.private_api import LoadHooks
from ktc.model.kernels.step_context import StepContext
from ktc.model.linears.gemv import Gemv
from ktc.model.linears.many_rows import ManyRows

_STOCK_FORWARD = nn.Linear.forward  # FusedLinear runs a replacement of it too


class FusedLinear(LoadHooks, nn.Linear):
    """An `nn.Linear` that a rule claimed; `ktc graph` and `print(model)` show it by this name.

    The kernels multiply the bytes of `weight` itself, so a PEFT merge into `weight` takes effect there too.
    """

    decode_kernel: Gemv | None = None
    prefill_kernel: ManyRows | None = None
    grid: Int4Grid | None = None
    step_context: StepContext | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        decode_kernel: Gemv | None = None,
        prefill_kernel: ManyRows | None = None,
        grid: Int4Grid | None = None,
    ) -> FusedLinear:
        """Return a layer that shares the parameters of `linear`, without a copy."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        made.weight = linear.weight
        made.register_parameter("bias", linear.bias)
        made.decode_kernel, made.prefill_kernel, made.grid = decode_kernel, prefill_kernel, grid
        made.step_context = None if decode_kernel is None and prefill_kernel is None else StepContext()
        return made.train(linear.training)

    def round_weight(self, *, in_place: bool = False) -> None:
        """Put the weight on the grid, a band of rows at a time, in memory of its own unless it is `in_place`.

        Raises `ValueError` for a weight that is not finite.
        """
        if self.grid is None:
            return
        weight = self.weight.detach()
        rounded = weight if in_place else torch.empty_like(weight)
        for band in bands(*weight.shape):
            rounded[band] = self.grid.rounded(weight[band])
        if not in_place:
            self.weight = nn.Parameter(rounded, requires_grad=self.weight.requires_grad)

    def after_load(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Put the weight on the grid again."""
        if not self.weight.is_meta:
            self.round_weight(in_place=True)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if nn.Linear.forward is not _STOCK_FORWARD:
            return super().forward(input)
        # In training mode reentrant checkpointing runs a forward without gradients and repeats it with them.
        decode = None if self.training else self.decode_kernel
        if decode is not None and decode.serves(input, self.weight, self.bias):
            return decode(input, self.weight, self.bias, self.step_context)
        prefill = self.prefill_kernel
        if prefill is not None and prefill.serves(input, self.weight, self.bias):
            return prefill(input, self.weight, self.bias, self.step_context)
        return super().forward(input)

    def extra_repr(self) -> str:
        decode = f", decode={self.decode_kernel.kernel.entry}" if self.decode_kernel is not None else ""
        prefill = f", prefill={self.prefill_kernel.product}" if self.prefill_kernel is not None else ""
        return super().extra_repr() + decode + prefill + (f", {self.grid}" if self.grid is not None else "")
