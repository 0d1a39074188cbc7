"""Experts whose subclass normalises the sum of the experts."""

import torch
from torch import nn

from .skeleton import CausalLM, Experts, Norm


class NormedExperts(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.level = Norm(config.hidden_size)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        routed = super().forward(hidden_states, top_k_index, top_k_weights)
        return self.level(routed)


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = NormedExperts(config)

    def forward(self, hidden_states):
        x = hidden_states.flatten(0, 1)
        scores, chosen = torch.topk(self.router(x).sigmoid(), self.top_k, dim=-1)
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return self.experts(x, chosen, scores).unflatten(0, hidden_states.shape[:2])


class InventedForCausalLM(CausalLM):
    block = Mixture
