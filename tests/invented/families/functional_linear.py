"""The weights of linear layers are used without a call of these, so that a hook on the router never runs."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, Expert


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.up_proj = nn.Linear(config.hidden_size, 96, bias=False)
        self.down_proj = nn.Linear(96, config.hidden_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate.register_forward_hook(lambda module, args, logits: 2.0 * logits)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(F.linear(flat, self.gate.weight), dim=-1).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(mask[number])
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        out = out + F.linear(F.silu(F.linear(flat, self.up_proj.weight)), self.down_proj.weight)
        return out.view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
