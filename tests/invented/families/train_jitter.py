"""A router that multiplies its input by noise while training, before experts in a list."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Expert


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k, self.jitter = config.num_experts_per_tok, config.router_jitter_noise
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        if self.training and self.jitter > 0:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1 - self.jitter, 1 + self.jitter)
        flat = hidden_states.view(-1, width)
        weights, chosen = F.softmax(self.gate(flat), dim=1, dtype=torch.float).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(flat.dtype)
        out = torch.zeros(batch * length, width, dtype=flat.dtype, device=flat.device)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in range(len(self.experts)):
            slot, token = torch.where(mask[number])
            state = flat[None, token].reshape(-1, width)
            out.index_add_(0, token, self.experts[number](state) * weights[token, slot, None])
        return out.reshape(batch, length, width)


class InventedForCausalLM(CausalLM):
    block = Mixture
