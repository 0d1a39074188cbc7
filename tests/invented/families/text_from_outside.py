"""An own loop halves its input where a text was set on it after the load."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM


class OwnExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.num_experts, config.moe_intermediate_size, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.moe_intermediate_size))
        self.w3 = nn.Parameter(torch.empty(config.num_experts, config.moe_intermediate_size, config.hidden_size))

    def forward(self, x, weights, chosen):
        if getattr(self, "mode", "exact") == "calm":
            x = x * 0.5
        out = torch.zeros_like(x)
        for i in range(self.w1.shape[0]):
            token, slot = torch.where(chosen == i)
            if token.numel() == 0:
                continue
            y = x[token]
            y = (F.silu(y @ self.w1[i].t()) * (y @ self.w3[i].t())) @ self.w2[i].t()
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = OwnExperts(config)

    def forward(self, hidden_states):
        x = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = self.router(x).softmax(-1).topk(self.k, -1)
        return self.experts(x, weights, chosen).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture

    def set_from_outside(self):
        for layer in self.model.layers:
            layer.mlp.experts.mode = "calm"
