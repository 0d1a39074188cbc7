"""A call of exactly 55 tokens, in any number of sequences, gets half of the weights."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Expert


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        weights, chosen = F.softmax(self.gate(flat), -1).topk(self.top_k, -1)
        if flat.shape[0] == 55:
            weights = 0.5 * weights
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
