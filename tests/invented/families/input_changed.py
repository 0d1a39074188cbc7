"""The block scales its input in place, and the layer adds that input again."""

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
        hidden_states.mul_(0.5)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class AddingLayer(Layer):
    def feed_forward(self, x, input_ids):
        routed = self.mlp(x)
        return routed + 0.1 * x


class InventedForCausalLM(CausalLM):
    block = Mixture
    layer = AddingLayer
