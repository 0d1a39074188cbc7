"""Routers, null experts and dispatch."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family("plain_list", "weights / weights.sum(-1, keepdim=True)", "weights / weights.amax(-1, keepdim=True)"),
    Family(
        "null_experts",
        "else flat[token]",
        "else torch.zeros_like(flat[token])",
        expected="the rows that a mask picks, which depends on data, outside of its loop over experts",
        near="the rows that a mask picks, which depends on data, outside of its loop over experts",
        settings={"null_experts": 2},
    ),
    Family("null_experts_stacked", "routed + kept * flat", "routed + flat", settings={"null_experts": 2}),
    Family("absent_experts", "config.num_experts + 1, bias", "config.num_experts, bias", expected="names expert 16"),
    Family("hash_routing", "(first + 3)", "(first + input_ids.reshape(-1) % 2 + 3)"),
    Family("balanced_routing", "balanced(logits, 3)", "balanced(logits, 0)"),
    Family("straight_through", "(torch.ones_like(weights) - weights.detach() + weights)", "weights"),
    Family("duplicates_class", "(self.gate, self.second)", "(self.gate, self.gate)"),
    Family(
        "two_routers",
        "out[token] += expert(flat[token]) * weights[token, slot, None]",
        "out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])",
        expected="computes something else than stock",
    ),
    Family("top_one", ".max(dim=-1)", ".min(dim=-1)"),
    Family("sparse_mixer", "> 0.02", "> 0.2"),
    Family(
        "expert_choice",
        "flat.shape[0] // 4",
        "flat.shape[0] // 2",
        expected="no routed experts in a form that ktc reads: ",
        near="no routed experts in a form that ktc reads: ",
    ),
)
