"""The second expert is chosen after the first one is masked, both among logits near the largest."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Expert


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        logits, pairs = self.gate(flat), []
        for _ in range(self.top_k):
            best, index = logits.max(dim=-1, keepdim=True)
            far = ((best - logits) / logits.abs().clamp(min=best)) > 0.02
            pairs.append((F.softmax(logits.masked_fill(far, float("-inf")), dim=-1).gather(-1, index), index))
            logits = logits.scatter(-1, index, float("-inf"))
        weights, chosen = (torch.cat(values, -1) for values in zip(*pairs, strict=True))
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(mask[number])
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
