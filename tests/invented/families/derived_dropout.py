"""Experts whose subclass drops parts of the result while training."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class DroppingExperts(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.resid_pdrop = config.resid_pdrop

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        return F.dropout(out, p=self.resid_pdrop, training=self.training)


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = DroppingExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, chosen = torch.topk(self.gate(flat), self.top_k, dim=-1)
        return self.experts(flat, chosen, F.softmax(logits, dim=-1)).reshape(hidden_states.shape)


class InventedForCausalLM(CausalLM):
    block = Mixture
