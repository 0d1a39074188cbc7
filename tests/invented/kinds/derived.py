"""Classes derived from an experts class."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family("gate_of_its_own", "(up + 1)", "up", settings={"swiglu_limit": 4.0}),
    Family("interleaved_gate", "gate_up[..., ::2], gate_up[..., 1::2]", "gate_up.chunk(2, dim=-1)"),
)
