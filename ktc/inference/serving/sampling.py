"""Tokens drawn for several sequences at once, each with random numbers of its own.

In: scores (rows, V) after the processors of `generate`, and a generator for each row. Out: tokens (rows,), those that
`torch.multinomial` draws for each row alone. Nothing waits for a GPU, as `torch.multinomial` does to check its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

_OF_LOGITS: Final = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
NOT_DRAWN: Final = "no token can be drawn: the scores have no finite maximum, or are not numbers"
Settings = tuple[tuple[type, tuple[tuple[str, Any], ...]], ...]


def shared_settings(processors: Sequence[object]) -> Settings | None:
    """Return processors as values, where each reads the logits of one step alone; None otherwise.

    Sequences with equal settings may be processed as rows of one call.
    """
    settings = list[tuple[type, tuple[tuple[str, Any], ...]]]()
    for processor in processors:
        values: dict[str, Any] = vars(processor)
        plain = all(isinstance(value, bool | int | float) for value in values.values())
        if type(processor) not in _OF_LOGITS or not plain:
            return None
        settings.append((type(processor), tuple(sorted(values.items()))))
    return tuple(settings)


def draw(scores: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return a token (rows,) drawn from each row of scores (rows, V); -1 where the probabilities are not numbers."""
    probabilities = torch.softmax(scores, dim=-1)
    noise = torch.empty_like(probabilities)
    for row, generator in zip(cast("Any", noise).split(1), generators, strict=True):
        row.exponential_(1, generator=generator)
    drawn = torch.div(probabilities, noise, out=noise).argmax(-1)
    return torch.where(probabilities[:, 0].isnan(), -1, drawn)  # one in a row makes all of its row
