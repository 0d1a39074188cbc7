"""The routed experts in plain PyTorch: the meaning of `fused_moe`, and what runs when a model is loaded as reference.

Tensor suffixes: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


def check_routing(top_k_index: Tensor, num_experts: int) -> None:
    """Raise `IndexError` where a token is sent to an expert that does not exist."""
    if top_k_index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(top_k_index))
    if low < 0 or high >= num_experts:
        found = low if low < 0 else high
        raise IndexError(f"`top_k_index` names expert {found}; this layer has experts 0 to {num_experts - 1}")


def fused_moe_reference(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Routed experts: `(T, H), (T, K) int64, (T, K), (E, 2I, H), (E, H, I) -> (T, H)`.

    Differentiable in every float input, in any float dtype; raises `IndexError` for an expert that does not exist.
    Rows of one expert keep the order (k, token) and experts are added in ascending order, as the eager
    implementation of Hugging Face does, so that a model in fp32 generates the same tokens.
    """
    check_routing(top_k_index, gate_up.shape[0])
    act = ACTIVATIONS[activation]
    out_TH = torch.zeros_like(hidden_states)
    slots_KT = top_k_index.T
    for expert in cast("list[int]", torch.unique(top_k_index).tolist()):
        k, token = torch.where(slots_KT == expert)
        gate, up = F.linear(hidden_states[token], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(act(gate) * up, down[expert]) * top_k_weights[token, k, None]
        out_TH = out_TH.index_add(0, token, y.to(out_TH.dtype))
    return out_TH
