"""All layers have the stacked experts of the first one, by the keys that the class declares tied."""

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


BANK = "model.layers.[1-9].mlp.experts"


class InventedForCausalLM(CausalLM):
    block = Mixture
    _tied_weights_keys: ClassVar = {
        f"{BANK}.gate_up_proj": "model.layers.0.mlp.experts.gate_up_proj",
        f"{BANK}.down_proj": "model.layers.0.mlp.experts.down_proj",
    }
