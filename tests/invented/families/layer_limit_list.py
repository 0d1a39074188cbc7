"""Experts in a list, their gate limited by a setting of the layer: the lists of all layers have the same code."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM


class LimitedExpert(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.w1 = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.w2 = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        limit = self.config.limits[self.layer_idx]
        return self.w2(F.silu(self.w1(x).clamp(max=limit)) * self.w3(x).clamp(-limit, limit))


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([LimitedExpert(config, layer_idx) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        flat = hidden_states.view(-1, width)
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot].unsqueeze(-1))
        return out.view(batch, length, width)


class InventedForCausalLM(CausalLM):
    block = Mixture
