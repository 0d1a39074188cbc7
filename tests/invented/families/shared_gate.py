"""All layers have one router, each has its own experts."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k, self.layer_idx = config.num_experts_per_tok, layer_idx
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[1:]:
            layer.mlp.gate = self.model.layers[0].mlp.gate
