"""Gate and up alternate in the first matrix, which is stored from inputs to outputs."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM, use_experts_implementation


@use_experts_implementation(is_transposed=True, has_bias=True, is_concatenated=False)
class TransposedExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        count, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(count, width, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden))

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return F.silu(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for number in range(self.gate_up_proj.shape[0]):
            token, slot = torch.where(top_k_index == number)
            state = hidden_states[token] @ self.gate_up_proj[number] + self.gate_up_proj_bias[number]
            state = self._apply_gate(state) @ self.down_proj[number] + self.down_proj_bias[number]
            out.index_add_(0, token, (state * top_k_weights[token, slot, None]).to(out.dtype))
        return out


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = TransposedExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


class InventedForCausalLM(CausalLM):
    block = Mixture
