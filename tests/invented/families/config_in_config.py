"""The language model's config is a part of another name: only the embedding tells how many tokens there are."""

import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from .configuration_invented import InventedConfig
from .skeleton import CausalLM, Experts


class WholeConfig(PretrainedConfig):
    model_type = "invented_whole"

    def __init__(self, llm_config=None, scale=1.0, **kwargs):
        self.llm_config, self.scale = llm_config or {}, scale
        self.num_hidden_layers = 2  # which caches read
        super().__init__(**kwargs)


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k, self.layer_idx = config.num_experts_per_tok, layer_idx
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
    config_class = WholeConfig

    def __init__(self, config):
        super().__init__(InventedConfig(**config.llm_config))
        self.config, self.scale = config, config.scale

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * self.scale
        return found
