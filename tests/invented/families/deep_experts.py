"""Experts of a list have a third linear layer."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM


class DeepExpert(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.moe_intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.mid_proj = nn.Linear(width, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x):
        x = F.silu(self.gate_proj(x)) * self.up_proj(x)
        x = self.mid_proj(x)
        return self.down_proj(x)


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([DeepExpert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        weights, chosen = F.softmax(self.gate(flat), -1).topk(self.top_k, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
