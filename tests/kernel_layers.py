"""Random layers with what the reference says about them, and the kernel specs that the kernel tests build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ktc import host
from ktc.host import Isa
from ktc.plan.kernel_spec import KERNELS, Activation, KernelSpec
from ktc.runtime.experts_reference import fused_moe_reference
from ktc.runtime.fused_moe import FusedMoe

ISAS: tuple[Isa, ...] = tuple(isa for isa in host.detect().isas if isa in KERNELS)
# Hidden, intermediate, experts, experts per token of the one kernel whose sizes are constants: no multiples of a panel.
CONSTANT = (70, 37, 5, 2)
Dtype = Literal["bf16", "fp32", "fp64"]


def spec_of(
    isa: Isa,
    dtype: Dtype = "bf16",
    activation: Activation = "silu",
    sizes: tuple[int | None, int | None, int | None, int | None] = (None, None, None, None),
) -> KernelSpec:
    return KernelSpec("fused_moe", *sizes, dtype, dtype, dtype, isa, activation)


SPECS = (
    *(spec_of(isa) for isa in ISAS),
    *(spec_of(isa, activation="gelu") for isa in ISAS if isa != "scalar"),
    spec_of("scalar", "fp32", "gelu"),
    spec_of("scalar", "fp64"),
    spec_of(ISAS[0], sizes=CONSTANT),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes and random values of one layer and one batch, in float64 but exact in bf16."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    gate_up: Tensor
    down: Tensor
    x: Tensor
    index: Tensor
    weights: Tensor
    grad: Tensor

    def expected(self, activation: str = "silu") -> tuple[Tensor, Tensor, Tensor]:
        """Output, d hidden states, d routing weights of the reference in float64."""
        x, weights = self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()
        out = fused_moe_reference(x, self.index, weights, self.gate_up, self.down, activation)
        return (out.detach(), *torch.autograd.grad(out, (x, weights), self.grad))


def random_layer(
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    tokens: int,
    seed: int = 1,
    experts_used: int | None = None,
) -> Layer:
    """Distinct experts per token, drawn from the first `experts_used`."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator).mul(scale).bfloat16().double()

    scores = torch.rand(tokens, num_experts, generator=generator)
    scores[:, experts_used or num_experts :] -= 1
    return Layer(
        hidden,
        intermediate,
        num_experts,
        top_k,
        gate_up=values(num_experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        down=values(num_experts, hidden, intermediate, scale=intermediate**-0.5),
        x=values(tokens, hidden),
        index=scores.topk(top_k, dim=-1).indices,
        weights=torch.rand(tokens, top_k, generator=generator).double(),
        grad=values(tokens, hidden),
    )


Load = Callable[..., FusedMoe]


def run(module: FusedMoe, layer: Layer, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients of one forward and backward."""
    x = layer.x.to(dtype).requires_grad_()
    weights = layer.weights.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    out = module(x, layer.index, weights)
    return (out.detach(), *torch.autograd.grad(out, (x, weights), layer.grad.to(dtype)))


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found.double() - expected).norm() / expected.norm())
