"""A block that returns its router's logits before the hidden states."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts, Layer


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(flat)
        weights, chosen = F.softmax(logits, dim=-1).topk(self.top_k)
        return logits, self.experts(flat, chosen, weights).view_as(hidden_states)


class UnpackingLayer(Layer):
    def feed_forward(self, x, input_ids):
        logits, routed = self.mlp(x)
        self.router_logits = logits
        return routed


class InventedForCausalLM(CausalLM):
    block = Mixture
    layer = UnpackingLayer

    def auxiliary(self):
        return 0.001 * sum(layer.router_logits.logsumexp(-1).pow(2).mean() for layer in self.model.layers)
