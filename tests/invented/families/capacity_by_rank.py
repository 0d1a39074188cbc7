"""The weight of a token that is beyond its expert's capacity is zero: its rank is a running count over the tokens."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.count, self.top_k = config.num_experts, config.num_experts_per_tok
        self.factor = 1.25
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), -1).topk(self.top_k, -1)
        capacity = int(self.factor * flat.shape[0] * self.top_k / self.count) + 1
        taken = F.one_hot(chosen, self.count).view(-1, self.count)
        rank = (taken.cumsum(0) * taken).sum(-1).view_as(chosen)
        weights = weights * (rank <= capacity)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
