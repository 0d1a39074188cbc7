"""The last layers have one bank of experts, by declared keys; the first ones have their own."""

from typing import ClassVar

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
    _tied_weights_keys: ClassVar = {
        "model.layers.3.mlp.experts.gate_up_proj": "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.experts.down_proj": "model.layers.2.mlp.experts.down_proj",
    }
