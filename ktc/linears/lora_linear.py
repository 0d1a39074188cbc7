"""`KTLinear`: a linear layer that a rule chose for an adapter, a kernel or both. PEFT wraps it as any `nn.Linear`.

In: an `nn.Linear`, whose weight and bias it shares. Out: the same function under the same names. Prefill and training
use PyTorch's product. Under the rule `kt_linear(gemv)`, the kernel multiplies few rows under `no_grad`.
"""

from __future__ import annotations

from torch import Tensor, nn

from ktc.linears.gemv import Gemv

_STOCK_FORWARD = nn.Linear.forward  # KTLinear runs a replacement of it too


class KTLinear(nn.Linear):
    """An `nn.Linear` that a rule claimed; `ktc graph` and `print(model)` show it by this name.

    `decode` multiplies the bytes of `weight` itself, so a PEFT merge into `weight` takes effect there too.
    """

    decode: Gemv | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, decode: Gemv | None = None) -> KTLinear:
        """Return a `KTLinear` that shares the parameters of `linear`: nothing is copied, gradients stay unchanged."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        made.weight = linear.weight
        made.register_parameter("bias", linear.bias)
        made.decode = decode
        return made.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        # In training mode reentrant checkpointing runs a forward without gradients and repeats it with them.
        decodes = self.decode is not None and not self.training and nn.Linear.forward is _STOCK_FORWARD
        if self.decode is not None and decodes and self.decode.serves(input, self.weight, self.bias):
            return self.decode(input, self.weight, self.bias)
        return super().forward(input)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", decode={self.decode.kernel.entry}" if self.decode is not None else "")
