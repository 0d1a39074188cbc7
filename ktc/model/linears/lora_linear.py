"""`KTLinear`: a linear layer that a rule chose for an adapter, a kernel or a grid. PEFT wraps it as any `nn.Linear`.

In: an `nn.Linear`, whose weight and bias it shares. Out: the same function under the same names, by PyTorch's product.
Under the rule `kt_linear`, kernels multiply few rows under `no_grad` (`gemv`) and many rows (`prefill = packed`).
Under `fake_quant` with a frozen base, the loader rounds the weight to the grid once (`round_weight`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.linears.gemv import Gemv
from ktc.model.linears.many_rows import ManyRows

_STOCK_FORWARD = nn.Linear.forward  # KTLinear runs a replacement of it too
_BAND = 1 << 22  # weights that are rounded at once: 16 MB as fp32


class KTLinear(nn.Linear):
    """An `nn.Linear` that a rule claimed; `ktc graph` and `print(model)` show it by this name.

    `decode` and `many` multiply the bytes of `weight` itself, so a PEFT merge into `weight` takes effect there too.
    """

    decode: Gemv | None = None
    many: ManyRows | None = None
    grid: Int4Grid | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        decode: Gemv | None = None,
        many: ManyRows | None = None,
        grid: Int4Grid | None = None,
    ) -> KTLinear:
        """Return a `KTLinear` that shares the parameters of `linear`: nothing is copied, gradients stay unchanged."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        made.weight = linear.weight
        made.register_parameter("bias", linear.bias)
        made.decode, made.many, made.grid = decode, many, grid
        return made.train(linear.training)

    def round_weight(self, *, in_place: bool = False) -> None:
        """Put the weight on the grid, a band of rows at a time, in memory of its own unless it is `in_place`.

        Raises `ValueError` for a weight that is not finite.
        """
        if self.grid is None:
            return
        weight = self.weight.detach()
        rounded = weight if in_place else torch.empty_like(weight)
        rows = max(1, _BAND // weight.shape[1])
        for first in range(0, weight.shape[0], rows):
            rounded[first : first + rows] = self.grid.rounded(weight[first : first + rows])
        if not in_place:
            self.weight = nn.Parameter(rounded, requires_grad=self.weight.requires_grad)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as any layer, and put the weight on the grid again."""
        super()._load_from_state_dict(*args, **kwargs)
        if not self.weight.is_meta:
            self.round_weight(in_place=True)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if nn.Linear.forward is not _STOCK_FORWARD:
            return super().forward(input)
        # In training mode reentrant checkpointing runs a forward without gradients and repeats it with them.
        decode = None if self.training else self.decode
        if decode is not None and decode.serves(input, self.weight, self.bias):
            return decode(input, self.weight, self.bias)
        if self.many is not None and self.many.serves(input, self.weight, self.bias):
            return self.many(input, self.weight, self.bias)
        return super().forward(input)

    def extra_repr(self) -> str:
        decode = f", decode={self.decode.kernel.entry}" if self.decode is not None else ""
        many = f", many={self.many.product}" if self.many is not None else ""
        return super().extra_repr() + decode + many + (f", {self.grid}" if self.grid is not None else "")
