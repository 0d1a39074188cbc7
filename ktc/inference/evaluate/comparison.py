"""A base and its tuned model side by side: each metric of both, the difference, and its confidence interval.

Input: the metrics of both, over the same samples. Output: frozen `Line`s. The interval of a difference is a paired
bootstrap (Efron and Tibshirani 1993, chapter 13): samples are resampled with replacement, the same for both models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktc.inference.evaluate.metrics import Metric

RESAMPLES = 1000
_OUTER = (2.5, 97.5)  # percentiles outside a 95 % interval


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in percent. Without a tuned model only `base` is set; `interval` covers 95 % of the resamples."""

    name: str
    base: float
    tuned: float | None = None
    delta: float | None = None
    interval: tuple[float, float] | None = None


def compare(base: Sequence[Metric], tuned: Sequence[Metric] | None, seed: int) -> tuple[Line, ...]:
    """Compare metric by metric; both have the same metrics, over the same samples."""
    if tuned is None:
        return tuple(Line(metric.name, metric.value) for metric in base)
    return tuple(_line(before, after, seed) for before, after in zip(base, tuned, strict=True))


def _line(base: Metric, tuned: Metric, seed: int) -> Line:
    assert base.name == tuned.name and base.statistics.shape == tuned.statistics.shape
    import numpy as np

    samples = len(base.statistics)
    drawn = np.random.default_rng(seed).multinomial(samples, [1 / samples] * samples, size=RESAMPLES)
    before, after = drawn @ base.statistics, drawn @ tuned.statistics
    deltas = [tuned.score(b, samples) - base.score(a, samples) for a, b in zip(before, after, strict=True)]
    low, high = np.percentile(deltas, _OUTER)
    return Line(base.name, base.value, tuned.value, tuned.value - base.value, (float(low), float(high)))
