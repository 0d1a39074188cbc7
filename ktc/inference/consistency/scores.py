"""Log-probabilities of given tokens, and how far two paths differ in them.

In: logits of a path, and the tokens. Out: frozen `Scores`, and the `Difference` of two paths. The mean is slime's
`train_rollout_logprob_abs_diff`: per sequence over its tokens, then over the sequences. The softmax is in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ktc.model.compare.shown import Shown, arguments

LARGE: Final = 0.1
"""A difference above it is counted: it changes a probability by more than a tenth."""


@dataclass(frozen=True, slots=True)
class Scores:
    """`logs` (N, T) fp32: log-probability of each next token; `first` (N, T) int64: the most probable token."""

    logs: Tensor
    first: Tensor

    def since(self, position: int) -> Scores:
        """Return the scores from a column on."""
        return Scores(self.logs[:, position:], self.first[:, position:])


@dataclass(frozen=True, slots=True)
class Difference:
    """Absolute differences of log-probabilities over `tokens` tokens.

    `mean`, `p99` and `largest` are `None` where a value is not finite. `above` is the share of tokens with more than
    `LARGE`, or not finite. `agreement` is the share with the same most probable token. `exact`: no bit differs.
    """

    mean: float | None
    p99: float | None
    largest: float | None
    above: float
    agreement: float
    exact: bool
    tokens: int


def score(logits: Tensor, next_tokens: Tensor) -> Scores:
    """Return the scores of `next_tokens` (N, T) under `logits` (N, T, V), on the CPU."""
    logs = torch.log_softmax(logits.detach().float(), -1)
    chosen = logs.gather(-1, next_tokens.to(logs.device)[..., None]).squeeze(-1)
    return Scores(chosen.cpu(), logits.detach().argmax(-1).cpu())


def read(model: Any, rows: Tensor, *, use_cache: bool = False, shown: Shown | None = None) -> Scores:
    """Return the scores (N, T - 1) of `rows` (N, T) int64 in one forward of a model."""
    logits: Tensor = model(**arguments(rows, shown, model.dtype), use_cache=use_cache).logits
    return score(logits[:, :-1], rows[:, 1:])


def joined(rows: Sequence[Scores]) -> Scores:
    """Join scores of sequences of one length."""
    return Scores(torch.cat([row.logs for row in rows]), torch.cat([row.first for row in rows]))


def difference(one: Scores, other: Scores) -> Difference:
    """Compare two paths over the same tokens."""
    gaps = (one.logs.double() - other.logs.double()).abs()
    finite = bool(gaps.isfinite().all())
    return Difference(
        float(gaps.mean(-1).mean()) if finite else None,
        float(gaps.flatten().quantile(0.99)) if finite else None,
        float(gaps.max()) if finite else None,
        float((~(gaps <= LARGE)).double().mean()),
        float((one.first == other.first).double().mean()),
        torch.equal(one.logs, other.logs) and torch.equal(one.first, other.first),
        gaps.numel(),
    )
