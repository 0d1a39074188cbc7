"""The limit of each expert's gate is a buffer that the checkpoint stores."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM


class LimitedExpert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.w2 = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)
        self.register_buffer("limit", torch.tensor(3.0))

    def forward(self, x):
        return self.w2(F.silu(torch.minimum(self.w1(x), self.limit)) * self.w3(x))


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([LimitedExpert(config) for _ in range(config.num_experts)])

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
