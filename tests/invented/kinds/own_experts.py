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
        expected="in each of `w1`, `w3`, `w2`, whose code is neither a loop over experts nor batched products",
        near="in each of `w1`, `w3`, `w2`, whose code is neither a loop over experts nor batched products",
    ),
    Family(
        "stacked_gathered",
        "routed = routed * 0.5",
        "routed = routed * 1.0",
        expected="no routed experts",
        near="no routed experts",
    ),
    Family(
        "uneven_experts",
        "48 if number % 2 else 24",
        "48",
        expected="its code depends on data",
    ),
    Family(
        "weights_given",
        "weight * self.w2(F",
        "weight.square() * self.w2(F",
        expected="its code depends on data",
        near="its code depends on data",
    ),
    Family(
        "limit_buffer",
        "torch.minimum(self.w1(x), self.limit)",
        "self.w1(x).clamp(max=3.0)",
        expected="are not MLPs that kernels compute",
        near="are not MLPs that kernels compute",
    ),
    Family(
        "constant_experts",
        "return torch.zeros_like(x)",
        "return -x",
        expected="its code depends on data",
        near="its code depends on data",
    ),
    Family(
        "linear_experts",
        "bias=False) for _",
        "bias=True) for _",
        expected="are not MLPs that kernels compute",
        near="are not MLPs that kernels compute",
    ),
    Family(
        "deep_experts",
        "x = self.mid_proj(x)",
        "x = x.clone()",
        expected="its code depends on data",
        near="`experts` holds `0.mid_proj.weight` beside the matrices of its experts",
    ),
    Family(
        "normed_experts",
        "x = self.norm(x)",
        "x = x.clone()",
        expected="its code depends on data",
        near="`experts` holds `0.norm.weight` beside the matrices of its experts",
    ),
)
