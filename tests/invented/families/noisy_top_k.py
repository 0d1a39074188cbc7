"""A second projection gives the spread of the noise that the choice receives while training."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class NoisyRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.plain = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.spread = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def forward(self, x):
        logits = self.plain(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.spread(x))
        best, chosen = logits.topk(self.top_k, dim=-1)
        spread = torch.full_like(logits, float("-inf")).scatter(-1, chosen, best)
        return F.softmax(spread, dim=-1).gather(-1, chosen), chosen


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.router, self.experts = NoisyRouter(config), Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = self.router(flat)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
