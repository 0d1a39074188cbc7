"""The choice of the next tokens as stock `generate` makes it, in operations that wait for nothing.

In: what `generate` gives its loop, and the logits of a step. Out: the same tokens, and what ends an answer, on the
device of the logits. Random tokens take as many numbers of the same generator as stock code.
Not for (None): inner results or scores that the caller requests, several processes with one length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ktc.model.hf.private_api import defers_stop, pad_token

_WANTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "is_assistant")


class EndedByHost(StoppingCriteria):
    """Ends all rows when `is_set` says so; the device is not asked."""

    def __init__(self, is_set: Callable[[], bool]) -> None:
        self.is_set = is_set

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        """Return whether each row ends, on the device of the ids."""
        return torch.full((len(input_ids),), self.is_set(), dtype=torch.bool, device=input_ids.device)


_OURS: Final = (MaxLengthCriteria, EosTokenCriteria, EndedByHost)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How tokens are chosen. `max_length` counts the prompt; `ends` (E,) are tokens that end a row.

    With `pads`, tokens of a row that is finished are `pad` ().
    `ended_by_host` and the criteria `others` are asked on the host.
    """

    processors: LogitsProcessorList
    samples: bool
    max_length: int
    ends: Tensor | None
    pad: Tensor | None
    pads: bool
    ended_by_host: tuple[EndedByHost, ...]
    others: StoppingCriteriaList

    @classmethod
    def of(cls, options: Mapping[str, Any], device: torch.device) -> TokenChoice | None:
        """Return the choice that the arguments of stock code's loop request, None where only that code makes it.

        So it is where stock code ends its loop a step later than its criteria say.
        """
        config, criteria = options.get("generation_config"), list(cast("Any", options.get("stopping_criteria") or ()))
        if config is None or options.get("synced_gpus") or any(getattr(config, name, None) for name in _WANTED):
            return None
        if defers_stop(device):
            return None
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        ends = [criterion.eos_token_id.reshape(-1) for criterion in criteria if type(criterion) is EosTokenCriteria]
        pad = pad_token(config)
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # as stock code asks
        if not lengths or (pads and pad is None):
            return None
        return cls(
            LogitsProcessorList(options.get("logits_processor") or ()),
            bool(config.do_sample),
            min(lengths),
            torch.cat(ends) if ends else None,
            pad,
            pads,
            tuple(one for one in criteria if type(one) is EndedByHost),
            StoppingCriteriaList(one for one in criteria if type(one) not in _OURS),
        )

    def on(self, device: torch.device) -> TokenChoice:
        """Return it with its tensors on a device."""
        ends, pad = (None if value is None else value.to(device) for value in (self.ends, self.pad))
        return replace(self, ends=ends, pad=pad)

    def chosen(self, ids_BL: Tensor, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (B,) behind `ids`, and whether no token can be drawn (), None if none is drawn."""
        if not self.samples and not self.processors:
            return logits_BV.argmax(-1), None  # numbers that are equal in fp32 are equal before
        scores: Tensor = self.processors(cast("Any", ids_BL), cast("Any", logits_BV.to(torch.float32, copy=True)))
        if not self.samples:
            return scores.argmax(-1), None
        probabilities = scores.softmax(-1)
        return drawn(probabilities), probabilities[:, 0].isnan().any()  # one in a row makes all of its row

    def after(self, tokens: Tensor, unfinished: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens with padding in rows that are finished, and the rows (B,) bool that are not behind them."""
        if self.pads:
            assert self.pad is not None, "there is one with criteria that pad"
            tokens = torch.where(unfinished, tokens, self.pad)
        if self.ends is not None:
            unfinished = unfinished & (tokens[:, None] != self.ends).all(-1)
        return tokens, unfinished


def drawn(probabilities: Tensor) -> Tensor:
    """Return what `torch.multinomial(probabilities, 1)[:, 0]` does, by its own operations.

    That one checks the numbers on the device, and a failed check ends CUDA for the process.
    """
    times = torch.empty_like(probabilities).exponential_(1)
    return torch.div(probabilities, times, out=times).argmax(-1)
