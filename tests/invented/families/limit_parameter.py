"""The limit in the gate of the experts class is a parameter of each layer."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class LimitedExperts(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.limit = nn.Parameter(torch.full((1,), 2.5))

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(torch.minimum(gate, self.limit)) * up


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = LimitedExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
