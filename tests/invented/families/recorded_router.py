"""Router logits that transformers records from a router, whose list of experts is a loop."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .skeleton import CausalLM, Expert, Layer, Trunk


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, flat):
        logits = F.linear(flat, self.weight)
        weights, chosen = F.softmax(logits, dim=-1, dtype=torch.float).topk(self.top_k, dim=-1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(flat.dtype), chosen


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, chosen = self.gate(flat)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(mask[number])
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


RECORDED = {
    "router_logits": OutputRecorder(Router, index=0),
    "hidden_states": Layer,
}


class Recorded(Trunk):
    _can_record_outputs = RECORDED

    @capture_outputs
    def forward(self, *args, output_router_logits=None, output_hidden_states=None):
        x, cache = super().forward(*args)
        return MoeModelOutputWithPast(last_hidden_state=x, past_key_values=cache)


class InventedForCausalLM(CausalLM):
    block = Mixture
    trunk = Recorded

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        output_router_logits=None,
        output_hidden_states=None,
        logits_to_keep=0,
        **kwargs,
    ):
        asked = self.config.output_router_logits if output_router_logits is None else output_router_logits
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            output_router_logits=asked,
            output_hidden_states=output_hidden_states,
        )
        logits, loss, auxiliary = self.lm_head(outputs.last_hidden_state), None, None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if asked:
            counts = self.config.num_experts, self.config.num_experts_per_tok
            auxiliary = load_balancing_loss_func(outputs.router_logits, *counts, attention_mask)
            loss = loss if loss is None else loss + 0.1 * auxiliary
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=auxiliary,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
        )
