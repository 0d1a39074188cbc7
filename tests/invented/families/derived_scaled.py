"""Experts whose subclass scales what the experts class returns."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class ScaledExperts(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.scale = 1.7

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) * self.scale


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = ScaledExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.gate(flat), dim=-1), self.top_k, dim=-1)
        return self.experts(flat, chosen, weights).reshape(hidden_states.shape)


class InventedForCausalLM(CausalLM):
    block = Mixture
