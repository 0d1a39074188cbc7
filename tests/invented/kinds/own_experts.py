"""Experts that are neither a list of plain MLPs nor a class that transformers replaces."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family(
        "stacked_loop",
        "y = y + (F.silu",
        "y = (F.silu",
        expected="its code depends on data",
    ),
    Family(
        "stacked_einsum",
        "combine = (F.one_hot(chosen, self.count).to(best.dtype) * best[..., None]).sum(-2)",
        "combine = probabilities",
        expected="no routed experts",
        near="no routed experts",
    ),
    Family(
        "stacked_gathered",
        "routed = routed * 0.5",
        "routed = routed * 1.0",
        expected="no routed experts",
        near="no routed experts",
    ),
    Family("uneven_experts", "48 if number % 2 else 24", "48", expected="its code depends on data"),
    Family("ungated_experts", ".square()", ".abs()"),
    Family(
        "shared_matrix",
        "[self.experts[0].down_proj]",
        "[expert.down_proj]",
        expected="nothing calls the modules of `experts`",
        near="nothing calls the modules of `experts`",
    ),
    Family(
        "weights_given",
        "weight * self.w2(F",
        "weight.square() * self.w2(F",
        expected="its code depends on data",
        near="its code depends on data",
    ),
)
