"""What the invented causal LMs share: a config, a trunk of layers, an attention, experts. No family of transformers.

A model is its attention and its mixture; `invent` makes the classes of a causal LM of them and registers these, so that
ktc can build the model from its config like any other. Names of classes and attributes are nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HEADS, HEAD_DIM, EXPERTS, CHOSEN = 4, 16, 16, 4


class InventedConfig(PreTrainedConfig):
    model_type = "invented"
    vocab_size: int = 256  # of twins too, so that a model is its own
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = HEADS
    num_key_value_heads: int = HEADS // 2
    num_experts: int = EXPERTS
    num_experts_per_tok: int = CHOSEN
    moe_intermediate_size: int = 48
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = False


class Levelled(nn.Module):
    """RMSNorm, spelled in its own way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.gain


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Rotates neighbouring pairs of the last dimension of x (b, h, s, d) by angle (s, d / 2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention by the interface of transformers: (b, h, s, d) thrice -> (b, s, h * d)."""
    core = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["sdpa"])
    out, _ = core(module, q, k, v, mask, dropout=0.0, scaling=q.shape[-1] ** -0.5)
    return out.flatten(-2)


class Separate(nn.Module):
    """Grouped-query attention with projections of its own."""

    def __init__(self, config: InventedConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.num_key_value_groups = 2
        self.ask = nn.Linear(config.hidden_size, HEADS * HEAD_DIM, bias=False)
        self.tell = nn.Linear(config.hidden_size, HEADS // 2 * HEAD_DIM, bias=False)
        self.give = nn.Linear(config.hidden_size, HEADS // 2 * HEAD_DIM, bias=False)
        self.merge = nn.Linear(HEADS * HEAD_DIM, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, angle: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = [
            p(hidden_states).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.ask, self.tell, self.give)
        ]
        return self.merge(attend(self, turned(heads[0], angle), turned(heads[1], angle), heads[2], mask))


class Fused(nn.Module):
    """Multi-head attention with one projection for queries, keys and values, and norms of queries and keys."""

    def __init__(self, config: InventedConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.num_key_value_groups = 1
        self.three = nn.Linear(config.hidden_size, 3 * HEADS * HEAD_DIM, bias=True)
        self.back = nn.Linear(HEADS * HEAD_DIM, config.hidden_size, bias=False)
        self.level = Levelled(HEAD_DIM)

    def forward(self, hidden_states: Tensor, angle: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.three(hidden_states).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        return self.back(attend(self, turned(self.level(q), angle), turned(self.level(k), angle), v, mask))


class Still(nn.Module):
    """No attention at all: for models whose mixture alone is looked at."""

    def __init__(self, config: InventedConfig, layer: int) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, angle: Tensor, mask: Tensor | None = None) -> Tensor:
        return hidden_states


class Layer(nn.Module):
    def __init__(
        self, config: InventedConfig, attention: type[nn.Module], mixture: type[nn.Module], layer: int
    ) -> None:
        super().__init__()
        self.look, self.think = attention(config, layer), mixture(config)
        self.level_look, self.level_think = Levelled(config.hidden_size), Levelled(config.hidden_size)

    def forward(self, x: Tensor, angle: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.look(hidden_states=self.level_look(x), angle=angle, mask=mask)
        return x + self.think(self.level_think(x))


class Invented(PreTrainedModel):
    """A causal LM of an attention and a mixture that a subclass names."""

    config_class = InventedConfig
    base_model_prefix = "trunk"
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_set_experts = True
    attention: type[nn.Module] = Separate
    mixture: type[nn.Module]

    def __init__(self, config: InventedConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.cells = nn.ModuleList(Layer(config, self.attention, self.mixture, i) for i in layers)
        self.final = Levelled(config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
        x = self.words(input_ids)
        position = torch.arange(x.shape[1], device=x.device)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None,
            position_ids=position[None],
        )  # fmt: skip
        speed = 100.0 ** -(torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
        for cell in self.cells:
            x = cell(x, position[:, None] * speed, mask)
        return CausalLMOutputWithPast(logits=self.out(self.final(x)))


def invent(name: str, mixture: type[nn.Module], attention: type[nn.Module] = Separate) -> type[InventedConfig]:
    """Registers a causal LM called `name` and returns the class of its configs."""
    config = type(f"{name.title()}Config", (InventedConfig,), {"model_type": f"invented_{name}"})
    members = {"config_class": config, "mixture": mixture, "attention": attention}
    AutoConfig.register(f"invented_{name}", config, exist_ok=True)
    AutoModelForCausalLM.register(config, type(f"{name.title()}LM", (Invented,), members), exist_ok=True)
    return config


# Experts -------------------------------------------------------------------------------------------------------------
class _Bank(nn.Module):
    """Experts as 3-D tensors, one after another in plain PyTorch; what they compute is `one`."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.gate_up_proj.shape[0]):
            token, slot = torch.where(top_k_index == expert)
            part = self.one(hidden_states[token], expert) * top_k_weights[token, slot, None]
            out = out.index_add(0, token, part.to(out.dtype))
        return out


@use_experts_implementation
class Bank(_Bank):
    """Gate and up one after the other, no biases: `act_fn(gate) * up`."""

    def __init__(self, config: InventedConfig, act_fn: Callable[[Tensor], Tensor] = functional.silu) -> None:
        super().__init__()
        width = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, width))
        self.act_fn = act_fn

    def one(self, x: Tensor, expert: int) -> Tensor:
        gate, up = functional.linear(x, self.gate_up_proj[expert]).chunk(2, -1)
        return functional.linear(self.act_fn(gate) * up, self.down_proj[expert])


@use_experts_implementation(is_transposed=True, has_bias=True)
class TransposedBank(_Bank):
    """Stored `[experts, in, out]`, with biases."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate) * up

    def one(self, x: Tensor, expert: int) -> Tensor:
        gate_up = x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
        return self._apply_gate(gate_up) @ self.down_proj[expert] + self.down_proj_bias[expert]
