"""A batch of more than two texts halves the shared expert."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Expert, Experts


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts, self.shared = Experts(config), Expert(config)

    def forward(self, hidden_states):
        batch, _, width = hidden_states.shape
        flat = hidden_states.reshape(-1, width)
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        share = 0.5 if batch > 2 else 1.0
        return (self.experts(flat, chosen, weights) + share * self.shared(flat)).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
