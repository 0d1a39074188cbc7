"""All experts on all tokens by einsum, combined by a one-hot of the choice; the weights may be normalised before."""

import torch
import torch.nn.functional as F
from torch import nn

from .skeleton import CausalLM


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        count, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.count, self.k = count, config.num_experts_per_tok
        self.gate = nn.Linear(hidden, count, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(count, width, hidden)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, hidden_states):
        probabilities = self.gate(hidden_states).softmax(-1)
        best, chosen = probabilities.topk(self.k, -1)
        combine = (F.one_hot(chosen, self.count).to(best.dtype) * best[..., None]).sum(-2)
        inner = F.silu(torch.einsum("bsh,eih->bsei", hidden_states, self.w1))
        inner = inner * torch.einsum("bsh,eih->bsei", hidden_states, self.w3)
        return torch.einsum("bsei,ehi,bse->bsh", inner, self.w2, combine)


class InventedForCausalLM(CausalLM):
    block = Mixture
