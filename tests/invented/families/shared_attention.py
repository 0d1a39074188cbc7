"""One attention module in all layers but the last; each layer has a cache of its own."""

from torch import nn

from .skeleton import CausalLM, Experts, Layer, Trunk


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class Numbered(Layer):
    def forward(self, *args):
        self.attn.layer_idx = self.layer_idx
        return super().forward(*args)


class OneAttention(Trunk):
    def __init__(self, config, layer, block):
        super().__init__(config, layer, block)
        for each in self.layers[:-1]:
            each.attn = self.layers[0].attn


class InventedForCausalLM(CausalLM):
    layer = Numbered
    trunk = OneAttention
    block = Mixture
