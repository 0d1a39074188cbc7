"""`KTLinear`: a linear layer that a rule chose for an adapter. It is an `nn.Linear`, so PEFT wraps it as it wraps one.

In: an `nn.Linear`, whose weight and bias it shares. Out: the same function under the same names.
"""

from __future__ import annotations

from torch import nn


class KTLinear(nn.Linear):
    """An `nn.Linear` that a rule claimed; `ktc graph` and `print(model)` show it by this name."""

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> KTLinear:
        """A `KTLinear` that holds the very parameters of `linear`: nothing is copied, gradients stay as they were."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        made.weight = linear.weight
        made.register_parameter("bias", linear.bias)
        return made.train(linear.training)
