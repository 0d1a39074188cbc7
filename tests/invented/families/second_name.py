"""A projection with two names, which the attention calls by the second."""

from torch import nn

from .skeleton import Attention, CausalLM, Experts, Layer


class Renamed(Attention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.query = self.q_proj

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs) + 0.1 * self.query(hidden_states)


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


class NamedTwice(Layer):
    def __init__(self, config, layer_idx, block):
        super().__init__(config, layer_idx, block)
        self.attn = Renamed(config, layer_idx)


class InventedForCausalLM(CausalLM):
    layer = NamedTwice
    block = Mixture
