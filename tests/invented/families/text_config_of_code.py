"""The config has parts for text and images, and the class with code of its own takes all of it."""

from typing import ClassVar

import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from .configuration_invented import InventedConfig
from .skeleton import CausalLM, Experts


class WholeConfig(PretrainedConfig):
    model_type = "invented_whole"
    sub_configs: ClassVar = {"text_config": InventedConfig}

    def __init__(self, text_config=None, vision_config=None, **kwargs):
        self.text_config = InventedConfig(**(text_config or {}))
        self.vision_config = vision_config or {}
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
        super().__init__(config.text_config)
        self.scale = config.vision_config.get("scale", 1.0)

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * self.scale
        return found
