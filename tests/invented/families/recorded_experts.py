"""Results of stacked experts that transformers records from their class."""

import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .skeleton import CausalLM, Experts, Layer, Trunk


class Mixture(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return self.experts(flat, chosen, weights).view_as(hidden_states)


RECORDED = {
    "router_logits": OutputRecorder(nn.Linear, index=0, layer_name="mlp.gate"),
    "experts": OutputRecorder(Experts, index=0),
    "hidden_states": Layer,
}


class Recorded(Trunk):
    _can_record_outputs = RECORDED

    @capture_outputs
    def forward(self, *args, output_router_logits=None, output_hidden_states=None, output_experts=None):
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
            output_experts=kwargs.get("output_experts"),
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
            attentions=outputs.get("experts"),
        )
