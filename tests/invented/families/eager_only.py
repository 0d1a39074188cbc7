"""A class without `sdpa`, whose eager attention prefers near positions."""

import torch
from torch import nn

from .skeleton import ALL_ATTENTION_FUNCTIONS, Attention, CausalLM, Experts, Layer, turn


def near_first(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    seen = key.shape[-2]
    place = torch.arange(seen, device=query.device)
    distance = place[seen - query.shape[2] :, None] - place
    scores = query @ key.transpose(2, 3) * scaling - 0.3 * distance
    if attention_mask is not None:
        scores = scores + attention_mask[..., :seen]
    return (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(1, 2).contiguous(), None


class OwnAttention(Attention):
    def forward(self, hidden_states, cos, sin, attention_mask=None, past_key_values=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, near_first)
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
    _supports_sdpa = False
