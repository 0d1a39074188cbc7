"""A subclass replaces the gate of the experts class: both halves are limited, the slope is not one, up is shifted."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts, use_experts_implementation


@use_experts_implementation
class BoundedExperts(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.limit, self.alpha = config.swiglu_limit, 1.702

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=True)
        self.experts = BoundedExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        values, chosen = torch.topk(self.gate(flat), self.top_k, dim=-1)
        return self.experts(flat, chosen, F.softmax(values, dim=1)).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
