"""A block clamps its result where one value of it is infinite."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat).tanh(), dim=-1).topk(self.top_k)
        out = self.experts(flat, chosen, weights)
        if torch.isinf(out).any():
            out = out.clamp(-1e4, 1e4)
        return out.view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
