"""The common part of all invented models: attention, layers, a cache, a loss. A family adds `block`, its experts.

`Expert` is one gated MLP for a list of experts. `Experts` holds all of a layer as stacked tensors, in the interface of
transformers. A family may replace `layer`, and `auxiliary`, which is added to the loss.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations.moe import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_invented import InventedConfig


class Norm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def turn(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    return (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(1, 2), None


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, cos, sin, attention_mask=None, past_key_values=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5, dropout=0.0)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))


class Expert(nn.Module):
    def __init__(self, config, width=None):
        super().__init__()
        width = width or config.moe_intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@use_experts_implementation
class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(config.num_experts, 2 * config.moe_intermediate_size, config.hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.moe_intermediate_size))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for expert in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            if expert == self.num_experts:
                continue
            slot, token = torch.where(mask[expert])
            state = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            state = F.linear(state, self.down_proj[expert]) * top_k_weights[token, slot, None]
            out.index_add_(0, token, state.to(out.dtype))
        return out


class Layer(nn.Module):
    def __init__(self, config, layer_idx, block):
        super().__init__()
        self.layer_idx = layer_idx
        self.norm_1, self.norm_2 = Norm(config.hidden_size), Norm(config.hidden_size)
        self.attn = Attention(config, layer_idx)
        self.mlp = block(config, layer_idx)

    def forward(self, x, cos, sin, attention_mask, past_key_values, input_ids):
        x = x + self.attn(self.norm_1(x), cos, sin, attention_mask=attention_mask, past_key_values=past_key_values)
        return x + self.feed_forward(self.norm_2(x), input_ids)

    def feed_forward(self, x, input_ids):
        return self.mlp(x)


class InventedPreTrainedModel(PreTrainedModel):
    config_class = InventedConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class Trunk(InventedPreTrainedModel):
    def __init__(self, config, layer, block):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([layer(config, i, block) for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        x = self.embed_tokens(input_ids)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device).unsqueeze(0)
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        speed = self.config.rope_base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = position_ids[..., None].float() * speed
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values
        )
        x = self.run(x, cos, sin, mask, past_key_values, input_ids)
        return self.norm(x), past_key_values

    def run(self, x, cos, sin, mask, past_key_values, input_ids):
        for layer in self.layers:
            x = layer(x, cos, sin, mask, past_key_values, input_ids)
        return x


class CausalLM(InventedPreTrainedModel, GenerationMixin):
    layer = Layer
    trunk = Trunk
    block: type

    def __init__(self, config):
        super().__init__(config)
        self.model = self.trunk(config, self.layer, self.block)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def auxiliary(self):
        return 0.0

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        x, cache = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        logits, loss = self.lm_head(x), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
            loss = loss + self.auxiliary()
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
