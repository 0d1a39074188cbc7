"""The routed experts in plain PyTorch: the definition of `fused_moe`, and the code of a model loaded as reference.

In: tensors as a stock experts module holds them, and their form. Refused: an expert that does not exist, a form and
biases that contradict each other. Tensor suffixes: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.trained.lora_dropout import AdaptedProduct
from ktc.model.kernels.form import Activation, ExpertsForm, Function, parse_form

# From rows (T, K) and a matrix (N, K) to (T, N); one for gate_up, one for down.
Product = Callable[[Tensor, Tensor], Tensor]
Products = tuple[Product, Product]
_FUNCTIONS: Final[Mapping[Function, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def check_routing(top_k_index: Tensor, num_experts: int) -> None:
    """Raise `IndexError` where a token is sent to an expert that does not exist."""
    if top_k_index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(top_k_index))
    if low < 0 or high >= num_experts:
        wrong = low if low < 0 else high
        raise IndexError(f"`top_k_index` names expert {wrong}; this layer has experts 0 to {num_experts - 1}")


def fused_moe_reference(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    stock: Sequence[Tensor],
    form: str | ExpertsForm = "silu",
    *,
    lora: ExpertsLora | None = None,
    products: Products | None = None,
) -> Tensor:
    """Compute routed experts: `(T, H), (T, K) int64, (T, K) -> (T, H)`, differentiable in every float input.

    `stock` are gate_up (E, 2I, H) and down (E, H, I), and their biases (E, 2I) and (E, H) where the form has them.
    `form` gives their layout: the shapes above are those of a plain form. `lora` adds low-rank products to both.
    `products` replace the products with the values themselves.
    Raises `IndexError` for an expert that does not exist and `ValueError` for an unknown form, or biases that
    contradict the form.
    Rows of one expert keep the order (k, token) and experts are added in ascending order, as the eager implementation
    of Hugging Face does, so that a model in fp32 generates the same tokens.
    """
    form = parse_form(form) if isinstance(form, str) else form
    if len(stock) != (4 if form.biased else 2):
        raise ValueError(f"experts of the form `{form}` {'need both biases' if form.biased else 'take no bias'}")
    check_routing(top_k_index, stock[0].shape[0])
    out_TH = torch.zeros_like(hidden_states)
    slots_KT = top_k_index.T
    for expert in cast("list[int]", torch.unique(top_k_index).tolist()):
        k, token = torch.where(slots_KT == expert)
        matrices = [tensor[expert] for tensor in stock]
        y = _expert_output(form, hidden_states[token], matrices, lora and _OfExpert(lora, expert, token), products)
        y = y * top_k_weights[token, k, None]
        out_TH = out_TH.index_add(0, token, y.to(out_TH.dtype))
    return out_TH


@dataclass(frozen=True, slots=True)
class _OfExpert:
    """The adapters of one expert, and the tokens of its rows (T,), which decide what is dropped."""

    lora: ExpertsLora
    expert: int
    tokens: Tensor

    def added(self, product: AdaptedProduct, x: Tensor) -> Tensor | float:
        """Return the adapter's part of a product, (T, inputs) -> (T, outputs), 0 without an adapter."""
        factors = self.lora.gate_up if product == "gate_up" else self.lora.down
        if factors is None:
            return 0.0
        bits = self.lora.bits(product, self.tokens, torch.full_like(self.tokens, self.expert), x.shape[1])
        return factors(self.expert, x, bits)


def _expert_output(
    form: ExpertsForm, x: Tensor, stock: Sequence[Tensor], lora: _OfExpert | None, products: Products | None
) -> Tensor:
    """Compute one expert's outputs, (T, H) -> (T, H), before routing weights."""
    (gate_up, down), (gate_up_bias, down_bias) = stock[:2], stock[2:] or (None, None)
    of_gate_up, of_down = products or (None, None)
    inner = _linear(form, x, gate_up, gate_up_bias, of_gate_up)
    if lora is not None:
        inner = inner + lora.added("gate_up", x)
    act = activated(form, inner)
    y = _linear(form, act, down, down_bias, of_down)
    return y if lora is None else y + lora.added("down", act)


def activated(form: ExpertsForm, gate_up: Tensor) -> Tensor:
    """From the outputs of gate_up, (..., 2I) as its weights are ordered or (..., I) without a gate, to (..., I)."""
    function = _function(form.activation)
    if not form.gated:
        return function(gate_up)
    gate, up = (gate_up[..., 0::2], gate_up[..., 1::2]) if form.interleaved else gate_up.chunk(2, dim=-1)
    limit = form.activation.limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if form.activation.up_cap is not None:
        up = _soft_capped(up, form.activation.up_cap)
    if form.activation.up_offset:
        up = up + form.activation.up_offset
    return function(gate) * up


def _function(activation: Activation) -> Callable[[Tensor], Tensor]:
    alpha, cap = activation.alpha, activation.gate_cap
    if cap is not None:
        return lambda x: _soft_capped(x, cap) * torch.sigmoid(alpha * x)
    return _FUNCTIONS[activation.function] if alpha == 1 else lambda x: x * torch.sigmoid(alpha * x)


def _soft_capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def _linear(form: ExpertsForm, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product | None) -> Tensor:
    if product is not None:
        y = product(x, weight.T if form.transposed else weight)
        return y if bias is None else y + bias
    if not form.transposed:
        return F.linear(x, weight, bias)
    return x @ weight if bias is None else x @ weight + bias
