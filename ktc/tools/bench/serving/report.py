"""The results of a load test: requests by their outcome, throughput, and latencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ktc.tools.bench.serving.load import Load, Outcome


@dataclass(frozen=True, slots=True)
class Phase:
    """The figures of one load. `failed` has each failure with its count; latencies are p50 and p99 in seconds.

    `cpu_seconds` are the server's: on a busy machine they say more than the time that passes.
    """

    clients: int
    seconds: float
    answered: int
    cancelled: int
    failed: dict[str, int]
    tokens: int
    tokens_per_second: float
    cpu_seconds: float
    tokens_per_cpu_second: float
    first_token: tuple[float, float]
    next_token: tuple[float, float]
    request: tuple[float, float]

    @classmethod
    def of(cls, load: Load, outcomes: Sequence[Outcome], seconds: float, cpu_seconds: float) -> Phase:
        """Return the figures of a load that took `seconds` in all, and `cpu_seconds` of the server."""
        states = Counter(each.state for each in outcomes)
        answered, cancelled = states.pop("answered", 0), states.pop("cancelled", 0)
        tokens = sum(each.tokens for each in outcomes)
        return cls(
            load.clients, seconds, answered, cancelled, dict(states), tokens, tokens / seconds,
            cpu_seconds, tokens / cpu_seconds if cpu_seconds else 0.0,
            _percentiles(each.first for each in outcomes if each.first is not None),
            _percentiles(gap for each in outcomes for gap in each.gaps),
            _percentiles(each.seconds for each in outcomes if each.state == "answered"),
        )  # fmt: skip


def as_json(one: Phase, many: Phase, left: dict[str, float]) -> dict[str, Any]:
    """Return the whole report; `left` is what the server's metrics say at the end."""
    ratios: dict[str, float | None] = {"ratio": None, "ratio_of_cpu_time": None}
    if one.tokens:
        ratios["ratio"] = many.tokens_per_second / one.tokens_per_second
        if one.cpu_seconds:
            ratios["ratio_of_cpu_time"] = many.tokens_per_cpu_second / one.tokens_per_cpu_second
    return {"one_client": asdict(one), "clients": asdict(many), **ratios, "server": left}


def _percentiles(values: Iterable[float]) -> tuple[float, float]:
    found = sorted(values)
    if not found:
        return 0.0, 0.0
    return found[len(found) // 2], found[min(len(found) - 1, int(len(found) * 0.99))]
