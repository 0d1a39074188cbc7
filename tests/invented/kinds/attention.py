"""Attention that the author has chosen otherwise: functions of the model's own, modules at several places."""

from __future__ import annotations

from invented.family import Family

_CHOSEN = "chooses the attention function `capped`"

FAMILIES = (
    Family("chosen_attention", '_implementation = "capped"', '_implementation = "sdpa"', attention=(_CHOSEN, "")),
    Family("chosen_later", '_implementation = "capped"', '_implementation = "sdpa"', attention=(_CHOSEN, "")),
    Family("attention_by_layer", "layer_idx % 2", "not layer_idx % 2", attention=(_CHOSEN,) * 2),
    Family("sdpa_replaced", 'FUNCTIONS["sdpa"]', 'FUNCTIONS["capped"]', attention=("own function `capped`", "")),
    Family("eager_only", "0.3 * distance", "0.1 * distance", attention=("own function `near_first`",) * 2),
    Family(
        "shared_attention",
        "self.layers[0].attn",
        "each.attn",
        attention=("are one module", ""),
        settings={"num_hidden_layers": 3},
    ),
    Family("second_name", "self.query = self.q_proj", "self.query = self.o_proj", attention=("are one module",) * 2),
)
