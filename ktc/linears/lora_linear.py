"""`KTLinear`: a linear layer that a rule chose for an adapter, a kernel or both. PEFT wraps it as any `nn.Linear`.

In: an `nn.Linear`, whose weight and bias it shares. Out: the same function under the same names. Prefill and training
are PyTorch's product; where a rule asks for it (`kt_linear(gemv)`), few rows under `no_grad` are the kernel's.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from ktc.linears.gemv import Gemv


class KTLinear(nn.Linear):
    """An `nn.Linear` that a rule claimed; `ktc graph` and `print(model)` show it by this name.

    `decode` multiplies the very bytes of `weight`: what PEFT merges into them counts there as everywhere.
    """

    decode: Gemv | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, decode: Gemv | None = None) -> KTLinear:
        """A `KTLinear` that holds the very parameters of `linear`: nothing is copied, gradients stay as they were."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        made.weight = linear.weight
        made.register_parameter("bias", linear.bias)
        made.decode = decode
        return made.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        # In training mode reentrant checkpointing runs without gradients what it then repeats with them.
        if self.decode is not None and not self.training and self.decode.serves(input, self.weight, self.bias):
            return self.decode(input, self.weight, self.bias)
        return functional.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", decode={self.decode.kernel.entry}" if self.decode is not None else "")
