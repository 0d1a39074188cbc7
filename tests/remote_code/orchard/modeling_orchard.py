"""Orchard: experts in a ModuleList called in a Python loop, as models were written before experts were one module.

`config.loop` chooses how the loop is spelled; all spellings compute the same.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_orchard import OrchardConfig


class OrchardNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def turn(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    return (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(1, 2), None


class OrchardAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.ask = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.offer = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.give = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.take = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, cos, sin, attention_mask=None, past_key_values=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.ask, self.offer, self.give))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5, dropout=0.0)
        return self.take(out.reshape(*hidden_states.shape[:-1], -1))


class OrchardPicker(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.picker_width, bias=False)
        self.w2 = nn.Linear(config.picker_width, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.picker_width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OrchardGrove(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count, self.per_token, self.loop = config.pickers, config.pickers_per_token, config.loop
        self.chooser = nn.Linear(config.hidden_size, config.pickers, bias=False)
        self.pickers = nn.ModuleList([OrchardPicker(config) for _ in range(config.pickers)])

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        flat = hidden_states.view(-1, width)
        logits = self.chooser(flat)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.per_token, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(flat.dtype)
        result = getattr(self, "by_" + self.loop)(flat, weights, chosen)
        return result.reshape(batch, length, width), logits

    def by_range(self, flat, weights, chosen):
        result = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=self.count).permute(2, 1, 0)
        for number in range(self.count):
            slot, token = torch.where(mask[number])
            state = flat[None, token].reshape(-1, flat.shape[-1])
            state = self.pickers[number](state) * weights[token, slot, None]
            result.index_add_(0, token, state.to(flat.dtype))
        return result

    def by_hit(self, flat, weights, chosen):
        result = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=self.count).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[number].squeeze(0))
            if token.shape[0] == 0:
                continue
            state = self.pickers[number](flat[token]) * weights[token, slot, None]
            result.index_add_(0, token, state.to(flat.dtype))
        return result

    def by_where(self, flat, weights, chosen):
        result = torch.zeros_like(flat)
        for number, picker in enumerate(self.pickers):
            token, slot = torch.where(chosen == number)
            result.index_add_(0, token, picker(flat[token]) * weights[token, slot, None])
        return result

    def by_repeat(self, flat, weights, chosen):
        numbers = chosen.view(-1)
        repeated = flat.repeat_interleave(self.per_token, dim=0)
        result = torch.empty_like(repeated)
        for number, picker in enumerate(self.pickers):
            result[numbers == number] = picker(repeated[numbers == number]).to(result.dtype)
        return (result.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    def by_sort(self, flat, weights, chosen):
        counts = chosen.new_zeros((chosen.shape[0], self.count)).scatter_(1, chosen, 1).sum(dim=0)
        order = chosen.view(-1).argsort()
        ordered, results, start = flat[order // self.per_token], [], 0
        for number, tokens in enumerate(counts.tolist()):
            end = start + tokens
            if tokens == 0:
                continue
            results.append(self.pickers[number](ordered[start:end]))
            start = end
        joined = torch.cat(results, dim=0)
        back = torch.empty_like(joined)
        back[order] = joined
        return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    def by_dense(self, flat, weights, chosen):
        spread = torch.zeros(flat.shape[0], self.count, dtype=flat.dtype, device=flat.device)
        spread = spread.scatter(1, chosen, weights)
        return sum(picker(flat) * spread[:, number, None] for number, picker in enumerate(self.pickers))

    def by_sum(self, flat, weights, chosen):
        result = torch.zeros_like(flat)
        for number, picker in enumerate(self.pickers):
            mine = chosen == number
            rows = mine.any(dim=-1)
            if not rows.any():
                continue
            result[rows] += picker(flat[rows]) * (weights * mine).sum(dim=-1)[rows, None]
        return result

    def by_scaled(self, flat, weights, chosen):
        """Not what experts are: the weights go into their input."""
        result = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=self.count).permute(2, 1, 0)
        for number in range(self.count):
            slot, token = torch.where(mask[number])
            result.index_add_(0, token, self.pickers[number](flat[token] * weights[token, slot, None]))
        return result


class OrchardTree(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm_1 = OrchardNorm(config.hidden_size, config.norm_eps)
        self.attn = OrchardAttention(config, layer_idx)
        self.norm_2 = OrchardNorm(config.hidden_size, config.norm_eps)
        self.grove = OrchardGrove(config)

    def forward(self, x, cos, sin, attention_mask, past_key_values):
        x = x + self.attn(self.norm_1(x), cos, sin, attention_mask=attention_mask, past_key_values=past_key_values)
        routed, logits = self.grove(self.norm_2(x))
        return x + routed, logits


class OrchardPreTrainedModel(PreTrainedModel):
    config_class = OrchardConfig
    base_model_prefix = "trunk"
    _supports_sdpa = True
    _supports_attention_backend = True


class OrchardTrunk(OrchardPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.trees = nn.ModuleList([OrchardTree(config, i) for i in range(config.trees)])
        self.norm = OrchardNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        x = self.embed(input_ids)
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
        for tree in self.trees:
            x, _ = tree(x, cos, sin, mask, past_key_values)
        return self.norm(x), past_key_values


class OrchardForCausalLM(OrchardPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.trunk = OrchardTrunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.trunk.embed

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
        x, cache = self.trunk(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
