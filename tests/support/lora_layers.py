"""Random layers with factors of LoRA on their experts, and what the reference says about them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kernel_layers import Layer, error
from torch import Tensor

from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.experts.trained.lora import ExpertsLora, Lora

# Of torch's generator before a call, which draws the seed of its dropout. `torch.manual_seed` would also take a lock of
# `torch.cuda`, which stays locked in a child that is forked while another thread seeds: the child then waits for ever.
DRAWN = 11


@dataclass(frozen=True, slots=True)
class Adapted:
    """A random layer with factors, in float64 but exact in bf16; `ranks` 0: none."""

    layer: Layer
    lora: ExpertsLora

    def reference(self) -> tuple[Tensor, ...]:
        """Output, then the gradients of hidden states, routing weights and factors."""
        x, weights, lora = trained(self, torch.float64, torch.float64)
        stock = [*self.layer.stock.values()]
        torch.default_generator.manual_seed(DRAWN)
        out = fused_moe_reference(x, self.layer.index, weights, stock, self.layer.form, lora=lora.drawn())
        return with_gradients(out, self.layer.grad, (x, weights, *lora.factors))


def trained(adapted: Adapted, dtype: torch.dtype, masters: torch.dtype) -> tuple[Tensor, Tensor, ExpertsLora]:
    def leaf(values: Tensor, to: torch.dtype) -> Tensor:
        return values.detach().to(to).clone(memory_format=torch.preserve_format).requires_grad_()

    def each_trained(lora: Lora | None) -> Lora | None:
        return lora and replace(lora, a=leaf(lora.a, masters), b=leaf(lora.b, masters))

    layer = adapted.layer
    lora = ExpertsLora(*(each_trained(each) for each in adapted.lora.products))
    return leaf(layer.x, dtype), leaf(layer.weights, masters), lora


def with_gradients(out: Tensor, grad: Tensor, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    present = [each for each in inputs if each is not None]
    return (out.detach(), *torch.autograd.grad(out, present, grad.to(out.dtype)))


def run_adapted(module: FusedMoe, adapted: Adapted, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    masters = torch.float64 if dtype == torch.float64 else torch.float32
    x, weights, lora = trained(adapted, dtype, masters)
    torch.default_generator.manual_seed(DRAWN)
    return with_gradients(
        module(x, adapted.layer.index, weights, lora), adapted.layer.grad, (x, weights, *lora.factors)
    )


def adapt(
    layer: Layer, rank: int | tuple[int, int], *, seed: int = 3, selecting: bool = False, dropout: float = 0.0
) -> Adapted:
    """Factors of both products, or of those with a rank; B is stored as PEFT stores it, with the experts last.

    Where they are `selecting`, A picks single inputs and the scale is a power of two: no low-rank value is rounded.
    """
    generator = torch.Generator().manual_seed(seed)

    def lora(rank: int, inputs: int, outputs: int) -> Lora | None:
        if rank == 0:
            return None
        a = torch.randn(layer.num_experts, rank, inputs, generator=generator).mul(inputs**-0.5).bfloat16()
        if selecting:
            a = torch.eye(rank, inputs).expand(layer.num_experts, -1, -1)
        b = torch.randn(outputs, rank, layer.num_experts, generator=generator).mul(0.25 * rank**-0.5).bfloat16()
        scale = 0.5 if selecting else 0.75
        return Lora(a.double(), b.double().permute(2, 0, 1), scale, dropout=dropout)

    first, down = rank if isinstance(rank, tuple) else (rank, rank)
    wide = layer.intermediate * (2 if layer.form.gated else 1)
    return Adapted(layer, ExpertsLora(lora(first, layer.hidden, wide), lora(down, layer.intermediate, layer.hidden)))


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], loose: float = 1) -> None:
    """Output, hidden states', routing weights' and factors' gradients within their bounds, times `loose`."""
    assert [tuple(each.shape) for each in found] == [tuple(each.shape) for each in expected]
    names = ("out", "x", "weights", *(f"factor {i}" for i in range(4)))
    for name, bound, ours, theirs in zip(names, (3e-3, 4e-3, *[5e-3] * 5), found, expected, strict=False):
        assert error(ours, theirs) <= bound * loose, (name, error(ours, theirs))
