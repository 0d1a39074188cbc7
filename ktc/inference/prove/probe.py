"""Every expert of a layer on real hidden states, independent of the choices of the router.

In: hidden states that the experts were given. Out: inputs that reach each expert alone, and the outputs of a stock or
compiled experts module for them. A text of some hundred tokens leaves many experts without a token, and a weighted sum
of several hides a small error of one; here an expert that is wrong shows by its number.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktc.model.compare.experts import Experts, call_alone
from ktc.model.experts.module import FusedMoe

_NUMBERS = 256  # of outputs at least per expert, so that an error does not depend on a few


@dataclass(frozen=True, slots=True)
class Probe:
    """Hidden states (..., N, H) in fp32, choices and weights (N, K), and the expert (N,) with weight 1; others have 0.

    The hidden states have as many dimensions as those that the layer gives its experts.
    """

    experts: Experts
    rows: Tensor
    index: Tensor
    weights: Tensor
    expert: Tensor


def make_probe(experts: Experts, rows: Tensor) -> Probe:
    """Return the inputs that reach every expert; `rows` (..., any number, H) are taken in turn."""
    rounds = -(-_NUMBERS // rows.shape[-1])
    numbers = torch.arange(experts.num_experts).repeat(rounds)
    index = (numbers[:, None] + torch.arange(experts.top_k)) % experts.num_experts
    weights = torch.zeros(index.shape)
    weights[:, 0] = 1.0
    return Probe(experts, rows[..., torch.arange(len(numbers)) % rows.shape[-2], :], index, weights, numbers)


def unprobed(experts: nn.Module) -> str:
    """Return why a stock experts module cannot run one expert alone; "" if it can."""
    if not isinstance(experts, nn.ModuleList):
        return ""
    required = [
        name
        for name, parameter in inspect.signature(experts[0].forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind in (0, 1)
    ]
    return "" if len(required) == 1 else f"its experts take {len(required)} arguments, so each is not compared alone"


def answers(module: nn.Module, probe: Probe, dtype: torch.dtype) -> Tensor:
    """Return the outputs (N, H) in fp32 of stock or compiled experts that compute in `dtype`."""
    rows = probe.rows.to(dtype)
    with torch.no_grad():
        if isinstance(module, nn.ModuleList):
            out = rows.new_zeros(rows.shape)
            for number, expert in enumerate(module):
                out[probe.expert == number] = expert(rows[probe.expert == number])
        else:
            weights = probe.weights if isinstance(module, FusedMoe) else probe.weights.to(dtype)
            out = call_alone(probe.experts, module, rows, probe.index, weights, probe.expert)
    return out.float().cpu()
