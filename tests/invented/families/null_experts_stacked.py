"""Indices behind the last expert add the weighted token beside the experts, whose weights are zeroed there."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k, self.real = config.num_experts_per_tok, config.num_experts
        self.gate = nn.Linear(config.hidden_size, config.num_experts + config.null_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), -1).topk(self.top_k, -1)
        null = chosen >= self.real
        kept = (weights * null).sum(-1, keepdim=True)
        routed = self.experts(flat, chosen.masked_fill(null, 0), weights.masked_fill(null, 0.0))
        return (routed + kept * flat).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
