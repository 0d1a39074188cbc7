"""A register of the file's own, in which `sdpa` is another function."""

import torch
from torch import nn
from transformers import AttentionInterface

from .skeleton import Attention, CausalLM, Experts, Layer, eager_attention, turn


def capped(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    scores = torch.tanh(query @ key.transpose(2, 3) * scaling / 2.0) * 2.0
    length, seen = query.shape[2], key.shape[2]
    later = torch.ones(length, seen, dtype=torch.bool, device=query.device).triu(seen - length + 1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None


FUNCTIONS = AttentionInterface()
FUNCTIONS["sdpa"] = capped


class OwnAttention(Attention):
    def forward(self, hidden_states, cos, sin, attention_mask=None, past_key_values=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))


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


class OwnLayer(Layer):
    def __init__(self, config, layer_idx, block):
        super().__init__(config, layer_idx, block)
        self.attn = OwnAttention(config, layer_idx)


class InventedForCausalLM(CausalLM):
    layer = OwnLayer
    block = Mixture
