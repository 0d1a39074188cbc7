"""Passes of prompts before the first request, so that kernels are compiled and loaded while no answer waits.

In: what computes passes, an adapter, and the tokens of a pass. Out: the prompts are read and forgotten. A kernel is
compiled at the first call of its kind, which takes up to a second, and kinds differ by numbers, not by values: one new
token, few (`MOST_TOKENS`) or many, in one row or several, padded or not, behind nothing or behind a cached beginning.
Then tokens are chosen from the logits, as drawn ones and as the most probable.
"""

from __future__ import annotations

import copy
import time
from typing import Final, NamedTuple

from torch import Tensor

from ktc.inference.serving.generation import Generation, choose_tokens
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.prefill import PrefillBatch
from ktc.inference.serving.request import Request
from ktc.inference.serving.row_cache import CachedRow
from ktc.model.attention.decode import MOST_TOKENS

SECONDS: Final = 30.0  # after which no further pass begins
_DRAWS: Final = ({"temperature": 0.8}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9})


class Kind(NamedTuple):
    """A pass: the new tokens of each row, and the tokens of its cached beginning, 0 for none."""

    new: tuple[int, ...]
    cached: tuple[int, ...]


def kinds(chunk: int, *, has_windows: bool) -> tuple[Kind, ...]:
    """Return a pass of each kind, of at most `chunk` tokens or a few more. The first has no beginning."""
    many, few = MOST_TOKENS + 3, MOST_TOKENS - 3
    alone = ((1, 0), (1, many), (few, 0), (few, many), (many, 0), (many, many))
    beside = ((1, 1), (few, few), (few, 2), (many, many), (many, 3))
    passes = [Kind((many,), (0,)), *(Kind((new,), (cached,)) for new, cached in alone)]
    passes += [Kind(new, (0, 0)) for new in beside]
    if not has_windows:  # several rows over cached beginnings need a cache without windows
        passes += [Kind(new, (many, many)) for new in beside]
        passes += [Kind(new, (many, few)) for new in beside]
    return *passes, Kind((chunk,), (0,)), Kind((chunk // 4, max(1, chunk // 4 - 1)) * 2, (0,) * 4)


def read_warm_prompts(runner: ModelRunner, adapter: str, chunk: int, seconds: float = SECONDS) -> int:
    """Read prompts of each kind with the adapter that is in use, and choose tokens; return how many passes were made.

    The model's sequences share a cache. After `seconds` no further pass begins.
    """
    until, rows = time.monotonic() + seconds, dict[int, CachedRow]()
    asked = kinds(chunk, has_windows=runner.size.has_windows)
    for number, kind in enumerate(asked):
        if time.monotonic() >= until:
            return number
        beginnings = [rows.get(length) for length in kind.cached]
        generations = [_generation(runner, adapter, new + length) for new, length in zip(*kind, strict=True)]
        batch = PrefillBatch(runner, generations, beginnings)
        logits = batch.advance()
        assert logits is not None, "all columns were read"
        for at, generation in enumerate(generations):
            rows.setdefault(len(generation.tokens), batch.row(at))
        _choose(runner, adapter, logits)
    return len(asked)


def _choose(runner: ModelRunner, adapter: str, logits: Tensor) -> None:
    """Choose tokens as requests of each setting do."""
    choose_tokens([_generation(runner, adapter, 1) for _ in logits], logits)
    for settings in _DRAWS:
        choose_tokens([_generation(runner, adapter, 1, settings) for _ in logits], logits)


def _generation(
    runner: ModelRunner, adapter: str, tokens: int, draws: dict[str, float] | None = None
) -> Generation:  # fmt: skip
    config = copy.deepcopy(runner.model.generation_config)
    config.update(do_sample=draws is not None, **(draws or {}))
    return Generation(Request("warm", _tokens(tokens), 1, config, seed=0, adapter=adapter), runner.model)


def _tokens(count: int) -> tuple[int, ...]:
    return tuple(number % 2 for number in range(count))
