"""The experts of a token follow from its number in the vocabulary."""

import torch
from torch import nn

from .skeleton import CausalLM, Experts, Layer


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.count, self.layer_idx = config.num_experts, layer_idx
        self.scale = nn.Linear(config.hidden_size, 2, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states, input_ids):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        first = (input_ids.reshape(-1) * 7 + self.layer_idx) % self.count
        chosen = torch.stack((first, (first + 3) % self.count), -1)
        return self.experts(flat, chosen, self.scale(flat).softmax(-1)).view_as(hidden_states)


class HashLayer(Layer):
    def feed_forward(self, x, input_ids):
        return self.mlp(x, input_ids)


class InventedForCausalLM(CausalLM):
    block = Mixture
    layer = HashLayer
