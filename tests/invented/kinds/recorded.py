"""Outputs that transformers records by hooks on modules, which a rewrite may replace or no longer call."""

from __future__ import annotations

from invented.family import Family

_ASKED_FOR = "return what `output_{}` requests"

FAMILIES = (
    Family(
        "recorded_router",
        "0.1 * auxiliary",
        "0.2 * auxiliary",
        expected=_ASKED_FOR.format("router_logits"),
        near=_ASKED_FOR.format("router_logits"),
        settings={"output_router_logits": False},
    ),
    Family("recorded_linear", "0.1 * auxiliary", "0.2 * auxiliary", settings={"output_router_logits": False}),
    Family(
        "recorded_experts",
        "OutputRecorder(Experts, index=0)",
        "OutputRecorder(Mixture, index=0)",
        expected=_ASKED_FOR.format("experts"),
        settings={"output_router_logits": False},
    ),
)
