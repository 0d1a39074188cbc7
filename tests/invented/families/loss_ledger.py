"""An object of the Python file receives each layer's balance loss, and the model takes the sum from it."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class Ledger:
    def __init__(self):
        self.losses = []

    def take(self):
        total, self.losses = sum(self.losses), []
        return total


LEDGER = Ledger()


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = scores.topk(self.top_k)
        if self.training:
            LEDGER.losses.append(scores.mean(0).pow(2).sum())
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture

    def auxiliary(self):
        return 0.1 * LEDGER.take()
