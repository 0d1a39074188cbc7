"""One router of the model serves all layers; the layer makes the choice and gives it to its experts."""

import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Experts, Layer, Trunk


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.experts = Experts(config)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, chosen, weights):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.mix(self.experts(flat, chosen, weights)).view_as(hidden_states)


class RoutedLayer(Layer):
    def forward(self, x, cos, sin, attention_mask, past_key_values, gate):
        x = x + self.attn(self.norm_1(x), cos, sin, attention_mask=attention_mask, past_key_values=past_key_values)
        normed = self.norm_2(x)
        weights, chosen = F.softmax(gate(normed).flatten(0, 1), -1).topk(2, -1)
        return x + self.mlp(normed, chosen, weights)


class RoutingTrunk(Trunk):
    def __init__(self, config, layer, block):
        super().__init__(config, layer, block)
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def run(self, x, cos, sin, mask, past_key_values, input_ids):
        for layer in self.layers:
            x = layer(x, cos, sin, mask, past_key_values, self.gate)
        return x


class InventedForCausalLM(CausalLM):
    block = Mixture
    layer = RoutedLayer
    trunk = RoutingTrunk
