"""LoRA on the routed experts of one layer. `W + scale * B A` is formed only where it is to be rounded (`delta`).

Its factors take four forms on their way from PEFT to C++:

1. PEFT's parameters, one A and one B for all experts; `peft_wrapper` reads them.
2. `ExpertsLora`: a `Lora(a, b, scale)` for the product gate_up and one for down, views of these parameters.
3. The trailing arguments of the operator `ktc::fused_moe`: `ExpertsLora.factors` and `.scales`, which `ExpertsLora.of`
   reads back.
4. `LoraFactors` of `interface/moe.hpp`, made by `lora_arguments` from factors of the kernel's dtype.

Dropout is drawn between 2 and 3, once for each call (`ExpertsLora.drawn`).
Refused: factors of another shape than the layer's weights, a rank above `MAX_RANK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

from ktc.model.experts.trained.lora_dropout import AdaptedProduct, Drop, dropped_below, kept_only, kept_scale
from ktc.model.experts.trained.weight_training import State, state_of
from ktc.model.kernels.kernel_library import Arguments

MAX_RANK: Final = 128


@dataclass(frozen=True, slots=True)
class Factors:
    """LoRA of one product: `a` (..., rank, inputs), `b` (..., outputs, rank), and the scale of their product.

    `parameters` and `scales` are those of all adapters that the factors were made of. A cache compares these, because
    joined factors are new tensors in each call. `dropout` is the probability with which an input of A is dropped, of a
    single adapter.
    """

    a: Tensor
    b: Tensor
    scale: float
    parameters: tuple[Tensor, ...] = ()
    scales: tuple[float, ...] = ()
    dropout: float = 0.0

    @classmethod
    def joined(cls, adapters: Sequence[Self]) -> Self:
        """Return several adapters as one of the sum of their ranks, and a single one as it is."""
        if len(adapters) == 1:
            return adapters[0]
        a = torch.cat([adapter.a for adapter in adapters], -2)
        b = torch.cat([adapter.b * adapter.scale for adapter in adapters], -1)
        parameters = tuple(parameter for adapter in adapters for parameter in adapter.parameters)
        return cls(a, b, 1.0, parameters, tuple(adapter.scale for adapter in adapters))


class Lora(Factors):
    """Factors of one product for all experts: `a` is (E, rank, inputs), `b` (E, outputs, rank).

    Outputs are in the order of the stock weight's rows.
    """

    __slots__ = ()

    @property
    def rank(self) -> int:
        """The number of columns of B."""
        return self.a.shape[1]

    def __call__(self, expert: int, x: Tensor, bits: Tensor | None = None) -> Tensor:
        """Compute `scale * B A x` of one expert, (..., inputs) -> (..., outputs), in the dtype of `x`.

        With the `bits` of `DroppedInputs`, A reads what is kept of `x`, (S, inputs).
        """
        x = x if bits is None else kept_only(x, bits)
        a, b = self.a[expert].to(x.dtype), self.b[expert].to(x.dtype)
        return torch.nn.functional.linear(torch.nn.functional.linear(x, a), b) * self.scale

    def delta(self, expert: int) -> Tensor:
        """Return `scale * B A` of one expert, (outputs, inputs), in fp32 or the factors' wider dtype.

        Autocast is off: it would round the factors, and the sum would not be the one that a merge into files has.
        """
        wide = torch.promote_types(self.a.dtype, torch.float32)
        with torch.autocast(self.a.device.type, enabled=False):
            return (self.b[expert].to(wide) @ self.a[expert].to(wide)) * self.scale

    def check(self, what: str, num_experts: int, inputs: int, outputs: int) -> None:
        """Raise `ValueError` for factors that do not fit a product of these sizes."""
        expected = ((num_experts, self.rank, inputs), (num_experts, outputs, self.rank))
        shapes = (tuple(self.a.shape), tuple(self.b.shape))
        if shapes != expected:
            raise ValueError(f"LoRA on `{what}`: expected factors of shapes {expected}, found {shapes}")
        if not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"LoRA on `{what}`: expected a rank from 1 to {MAX_RANK}, found {self.rank}")

    def to(self, dtype: torch.dtype) -> Lora:
        """Return the factors as a kernel reads them, detached; copied only if the dtype differs or A is strided."""
        return Lora(self.a.detach().to(dtype).contiguous(), self.b.detach().to(dtype), self.scale)

    def on(self, device: torch.device) -> Lora:
        """Return the factors on a device, differentiable; from page-locked memory a copy is issued, not waited for."""
        a, b = (factor.to(device, non_blocking=factor.is_pinned()) for factor in (self.a, self.b))
        parameters, scales = self.parameters or (self.a, self.b), self.scales or (self.scale,)
        return Lora(a, b, self.scale, parameters, scales, self.dropout)

    def zeros(self, dtype: torch.dtype) -> Lora:
        """Return zeros to add gradients to. B's has the strides of PEFT's own parameter, (outputs, rank, E)."""
        num_experts, outputs, rank = self.b.shape
        b = self.b.new_zeros((outputs, rank, num_experts), dtype=dtype).permute(2, 0, 1)
        return Lora(self.a.new_zeros(self.a.shape, dtype=dtype), b, self.scale)


@dataclass(frozen=True, slots=True)
class ExpertsLora:
    """The adapted products of a layer: gate_up (up alone without a gate), down, or both.

    `drop` is the dropout of one call, `None` without. Scales then contain the factor of what is kept.
    """

    gate_up: Lora | None = None
    down: Lora | None = None
    drop: Drop | None = None

    @classmethod
    def of(cls, factors: Sequence[Tensor | None], scales: Sequence[float], drop: Drop | None = None) -> ExpertsLora:
        """Return the value that has these `factors`, `scales` and dropout."""
        gate_up_a, gate_up_b, down_a, down_b = factors
        return cls(_lora(gate_up_a, gate_up_b, scales[0]), _lora(down_a, down_b, scales[1]), drop)

    def drawn(self) -> ExpertsLora:
        """Return the factors for one call: with a seed drawn where the adapters have dropout."""
        gate_up, down = (0.0 if lora is None else lora.dropout for lora in self.products)
        if not (dropped_below(gate_up) or dropped_below(down)):
            return self
        first, second = (lora and replace(lora, scale=lora.scale * kept_scale(lora.dropout)) for lora in self.products)
        return ExpertsLora(first, second, Drop.drawn(gate_up, down))

    def bits(self, product: AdaptedProduct, tokens: Tensor, experts: Tensor, columns: int) -> Tensor | None:
        """Return what is kept of a product's inputs in this call: see `DroppedInputs.bits`; `None`: all."""
        dropped = self.drop and self.drop.of_product(product, tokens.device)
        return None if dropped is None else dropped.bits(tokens, experts, columns)

    @property
    def products(self) -> tuple[Lora | None, Lora | None]:
        """The factors of gate_up and of down."""
        return self.gate_up, self.down

    @property
    def factors(self) -> tuple[Tensor | None, ...]:
        """A and B of gate_up, A and B of down."""
        return tuple(tensor for lora in self.products for tensor in ((lora.a, lora.b) if lora else (None, None)))

    @property
    def state(self) -> State:
        """A value that differs after an adapter or its scale changed, or other adapters became active."""
        adapted = [lora for lora in self.products if lora is not None]
        parameters = (parameter for lora in adapted for parameter in (lora.parameters or (lora.a, lora.b)))
        return state_of(parameters, (scale for lora in adapted for scale in (lora.scales or (lora.scale,))))

    @property
    def scales(self) -> tuple[float, float]:
        """The scales of gate_up and of down, 1 without LoRA."""
        gate_up, down = (1.0 if lora is None else lora.scale for lora in self.products)
        return gate_up, down

    @property
    def ranks(self) -> tuple[int, int]:
        """The ranks of gate_up and of down, 0 without LoRA."""
        gate_up, down = (0 if lora is None else int(lora.rank) for lora in self.products)
        return gate_up, down

    @property
    def requires_grad(self) -> bool:
        """Whether any factor is trained."""
        return any(factor is not None and factor.requires_grad for factor in self.factors)

    def to(self, dtype: torch.dtype) -> ExpertsLora:
        """Apply `Lora.to` to both products."""
        gate_up, down = (lora and lora.to(dtype) for lora in self.products)
        return ExpertsLora(gate_up, down, self.drop)

    def on(self, device: torch.device) -> ExpertsLora:
        """Return the factors on a device, differentiable: themselves where they are there."""
        if all(factor is None or factor.device == device for factor in self.factors):
            return self
        gate_up, down = (lora and lora.on(device) for lora in self.products)
        return ExpertsLora(gate_up, down, self.drop)

    def zeros(self, dtype: torch.dtype) -> ExpertsLora:
        """Apply `Lora.zeros` to both products."""
        gate_up, down = (lora and lora.zeros(dtype) for lora in self.products)
        return ExpertsLora(gate_up, down)


NO_LORA: Final = ExpertsLora()


def lora_arguments(lora: ExpertsLora, gradients: ExpertsLora | None = None, *, interleaved: bool) -> Arguments:
    """Return a kernel's arguments for the adapted products. It adds to `gradients`.

    Both must be in the kernel's dtype (`Lora.to`, `Lora.zeros`) and must outlive the call.
    """
    first, down = (None, None) if gradients is None else gradients.products
    fields: Arguments = {}
    if lora.gate_up is not None:
        fields["lora_first"] = _factors(lora.gate_up, first, interleaved=interleaved)
    if lora.down is not None:
        fields["lora_down"] = _factors(lora.down, down, interleaved=interleaved)
    if lora.drop is not None:
        probabilities = {"lora_first": lora.drop.gate_up, "lora_down": lora.drop.down}
        for name, of_product in fields.items():
            of_product.update(dropped=dropped_below(probabilities[name]), seed=int(lora.drop.seed))
    return fields


def _factors(lora: Lora, gradients: Lora | None, *, interleaved: bool) -> Arguments:
    fields: Arguments = {
        "a": lora.a.data_ptr(), "b": lora.b.data_ptr(), "rank": lora.rank, "scale": lora.scale,
        "interleaved": interleaved, "b_strides": _strides(lora.b),
    }  # fmt: skip
    if gradients is not None:
        fields["grad_a"], fields["grad_b"] = gradients.a.data_ptr(), gradients.b.data_ptr()
        fields["grad_b_strides"] = _strides(gradients.b)
    return fields


def _lora(a: Tensor | None, b: Tensor | None, scale: float) -> Lora | None:
    return None if a is None or b is None else Lora(a, b, scale)


def _strides(b: Tensor) -> Arguments:
    expert, output, rank = b.stride()
    return {"expert": expert, "output": output, "rank": rank}
