"""A subclass counts the tokens of each expert in a buffer of its own."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class CountingExperts(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(config.num_experts, dtype=torch.long))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self.seen += F.one_hot(top_k_index, self.num_experts).sum((0, 1))
        return super().forward(hidden_states, top_k_index, top_k_weights)


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = CountingExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
