"""LoRA on the routed experts of one layer: the factors, their meaning in PyTorch, and the form kernels read.

In: factors of any float dtype, in the shapes and with the scale that PEFT gives them. `W + scale * B A` is never made.
Refused: factors of another shape than the layer's weights, or of a rank above `MAX_RANK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.experts.kernel_library import NativeLora, Strides

MAX_RANK: Final = 128
NO_LORA: Final[NativeLora] = (0, 0, 0, 0, 0, 1.0, False, (0, 0, 0), (0, 0, 0))


@dataclass(frozen=True, slots=True)
class Lora:
    """Factors of one product for all experts: `a` is (E, rank, inputs), `b` (E, outputs, rank).

    Outputs stand in the order of the stock weight's rows.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """How many columns B has."""
        return self.a.shape[1]

    def __call__(self, expert: int, x: Tensor) -> Tensor:
        """`scale * B A x` of one expert, (..., inputs) -> (..., outputs), in the dtype of `x`."""
        a, b = self.a[expert].to(x.dtype), self.b[expert].to(x.dtype)
        return torch.nn.functional.linear(torch.nn.functional.linear(x, a), b) * self.scale

    def check(self, what: str, num_experts: int, inputs: int, outputs: int) -> None:
        """Raise `ValueError` for factors that are none of a product with these sizes."""
        expected = ((num_experts, self.rank, inputs), (num_experts, outputs, self.rank))
        found = (tuple(self.a.shape), tuple(self.b.shape))
        if found != expected:
            raise ValueError(f"LoRA on `{what}`: expected factors of shapes {expected}, found {found}")
        if not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"LoRA on `{what}`: expected a rank from 1 to {MAX_RANK}, found {self.rank}")


@dataclass(frozen=True, slots=True)
class ExpertsLora:
    """What is adapted of a layer: the product of gate and up (or of up alone), down, or both."""

    first: Lora | None = None
    down: Lora | None = None

    @property
    def products(self) -> tuple[Lora | None, Lora | None]:
        """Of the first product and of down."""
        return self.first, self.down

    @property
    def factors(self) -> tuple[Tensor | None, ...]:
        """A and B of the first product, A and B of down."""
        return tuple(tensor for lora in self.products for tensor in ((lora.a, lora.b) if lora else (None, None)))

    @property
    def requires_grad(self) -> bool:
        """Whether any factor is trained."""
        return any(factor is not None and factor.requires_grad for factor in self.factors)


@dataclass(frozen=True, slots=True)
class NativeFactors:
    """One product's factors as a kernel reads them: accumulators, with gradients that backward fills.

    B stays as it is stored. Its gradient lies as PEFT stores B, (outputs, rank, E).
    """

    a: Tensor
    b: Tensor
    scale: float
    interleaved: bool
    grad_a: Tensor | None = None
    grad_b: Tensor | None = None

    @classmethod
    def of(cls, lora: Lora, dtype: torch.dtype, interleaved: bool, *, gradients: bool) -> NativeFactors:
        """Copied only where `lora` has another dtype. Gradients begin as zeros, and stay so without tokens."""
        a, b = lora.a.detach().to(dtype).contiguous(), lora.b.detach().to(dtype)
        if not gradients:
            return cls(a, b, lora.scale, interleaved)
        num_experts, outputs, rank = b.shape
        grad_b = b.new_zeros(outputs, rank, num_experts).permute(2, 0, 1)
        return cls(a, b, lora.scale, interleaved, torch.zeros_like(a), grad_b)

    @property
    def native(self) -> NativeLora:
        """Addresses, rank, scale, the order of the outputs, and strides."""
        grad_a, grad_b = (0 if grad is None else grad.data_ptr() for grad in (self.grad_a, self.grad_b))
        addresses = self.a.data_ptr(), self.b.data_ptr(), grad_a, grad_b
        of_gradient = (0, 0, 0) if self.grad_b is None else self._strides(self.grad_b)
        return *addresses, self.a.shape[1], self.scale, self.interleaved, self._strides(self.b), of_gradient

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of A and of B."""
        assert self.grad_a is not None, "made for forward, without gradients"
        assert self.grad_b is not None, "made for forward, without gradients"
        return self.grad_a, self.grad_b

    @staticmethod
    def _strides(b: Tensor) -> Strides:
        expert, output, rank = b.stride()
        return expert, output, rank


def native_arguments(factors: Sequence[NativeFactors | None]) -> tuple[NativeLora, ...]:
    """What a kernel's call takes, for products with and without LoRA."""
    return tuple(NO_LORA if each is None else each.native for each in factors)
