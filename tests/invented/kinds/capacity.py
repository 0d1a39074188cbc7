"""Tokens beyond a limit, and branches on the size of a call."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family(
        "capacity_fixed",
        "config.num_experts_per_tok, 40",
        "config.num_experts_per_tok, 100_000",
        expected="something else for calls of another length",
        near="something else for calls of another length",
    ),
    Family(
        "capacity_far",
        "config.num_experts_per_tok, 5000",
        "config.num_experts_per_tok, 3",
        expected="compares with 5000",
        near="computes something else than stock",
    ),
    Family("capacity_by_rank", "self.factor = 1.25", "self.factor = 1000.0"),
    Family("one_token", "if flat.shape[0] == 1:", "if flat.shape[0] == 0:"),
    Family("batch_branch", "0.5 if batch > 2 else 1.0", "0.5 if batch > 200 else 1.0"),
    Family(
        "exact_count",
        "flat.shape[0] == 55",
        "flat.shape[1] == 55",
        expected="something else for calls of another length",
    ),
    Family("value_branch", "torch.where(largest > 8.0,", "torch.where(largest > 8e30,"),
    Family(
        "flat_capacity", "<= 200", "<= 100_000", expected="all tokens to one expert", near="no input is on both sides"
    ),
)
