"""Experts whose own loop scales their sum, which grouped products leave out; stock chooses the latter."""

import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from .skeleton import CausalLM, Experts


@use_experts_implementation
class Scaled(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        summed = Experts.forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)
        return 1.4 * summed + self.shift


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Scaled(config)

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
