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
    ),
    Family(
        "outside_expert",
        "self.mlp.experts[0](x)",
        "x",
        expected="expert 0 is not a module of its own",
    ),
    Family(
        "type_asked",
        "0.5 * self.mlp(x) if type(self.mlp) is Mixture else",
        "0.25 * self.mlp(x) if isinstance(self.mlp, Mixture) else",
        expected="code around it reads its class",
    ),
    Family("asks_experts", "self.experts.act_fn(", "F.relu(", expected="no attribute 'act_fn'"),
    Family("halves", "weights[:half]", "2 * weights[:half]"),
    Family(
        "decode_flag",
        "0.5 if decoding",
        "1.0 if decoding",
        expected="called with more than hidden states",
        near="called with more than hidden states",
    ),
    Family(
        "functional_linear",
        "F.linear(flat, self.gate.weight)",
        "self.gate(flat)",
        near="computes something else than stock",
    ),
    Family(
        "tied_experts",
        "= self.model.layers[0].mlp.experts",
        "= layer.mlp.experts",
        expected="is also `model.layers.",
    ),
    Family("two_classes", "flat = flat + self.experts(", "flat = self.experts("),
)
