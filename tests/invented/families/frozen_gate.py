"""The gate of decorated experts halves its result where the weights are frozen."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts


class AskingExperts(Experts):
    def _apply_gate(self, gate_up):
        opened = super()._apply_gate(gate_up)
        return opened if self.gate_up_proj.requires_grad else opened * 0.5


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = AskingExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
