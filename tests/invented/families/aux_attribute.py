"""A block with a list of experts leaves a balance loss behind as an attribute, and the model adds it to its loss."""

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
        self.balance_loss = None

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        scores = F.softmax(self.gate(flat), -1)
        weights, chosen = scores.topk(self.top_k, -1)
        share = F.one_hot(chosen, len(self.experts)).float().sum(1).mean(0)
        self.balance_loss = (share * scores.mean(0)).sum() * len(self.experts)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture

    def auxiliary(self):
        return 0.01 * sum(layer.mlp.balance_loss for layer in self.model.layers)
