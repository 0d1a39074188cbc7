"""Where blocks and routers stand in a layer."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family("router_before", "own if logits is None else logits", "own", settings={"num_hidden_layers": 4}),
    Family("router_of_model", "gate(normed)", "gate(x)"),
    Family(
        "logits_first",
        "return logits, self.experts(flat, chosen, weights).view_as(hidden_states)",
        "return logits, hidden_states + self.experts(flat, chosen, weights).view_as(hidden_states)",
        expected="no routed experts",
        near="no routed experts",
    ),
)
