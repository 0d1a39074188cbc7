"""Experts that compute something else by each implementation of transformers: they run as stock runs them."""

from __future__ import annotations

from invented.family import Family

_BESIDE = "holds `shift` beside its matrices"

FAMILIES = (
    Family("two_loops", "@use_experts_implementation\n", "", expected=_BESIDE, near="its code depends on data"),
    Family(
        "loop_by_config",
        "1.4 * summed",
        "1.3 * summed",
        expected=_BESIDE,
        near=_BESIDE,
        settings={"experts_implementation": "eager"},
    ),
)
