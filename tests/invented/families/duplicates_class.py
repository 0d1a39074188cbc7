"""Both choices of a token may be the same expert."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k, self.layer_idx = config.num_experts_per_tok, layer_idx
        self.second = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        pairs = [F.softmax(gate(flat), dim=-1).max(-1) for gate in (self.gate, self.second)]
        weights, chosen = (torch.stack(values, -1) for values in zip(*pairs, strict=True))
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
