"""Log-probabilities on the paths of a model that serves, in evaluation mode and without gradients.

In: a model, and sequences. Out: `Scores` of three paths. *Calls*: the trainer's own batches and autocast, in a forward
that serves; with the trainer's weights and kernels no bit may differ. *Prompt*: each sequence read in one call with a
cache, as `generate` reads a prompt. *Decode*: a prompt, then one token after the other by `generate` itself, with its
cache, its kernels of few rows and its native or captured steps; the next token is given and not chosen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from ktc.inference.consistency.scores import Scores, joined, read, score
from ktc.model.compare.shown import Shown, arguments


@dataclass(frozen=True, slots=True)
class Served:
    """Scores (N, T - 1) of `together` (all sequences in one call), `alone` (a call each) and `prompt`.

    `decode` (N, T - P) has the tokens after a prompt of P.
    """

    together: Scores
    alone: Scores
    prompt: Scores
    decode: Scores


def calls_of(rows: Tensor, prompt: int, batch_size: int) -> int:
    """Count the calls of a model in `serving_scores`."""
    number, length = rows.shape
    return 1 + 2 * number + -(-number // batch_size) * (length - prompt)


def serving_scores(
    model: nn.Module, rows: Tensor, *, prompt: int, batch_size: int, autocast: bool,
    shown: Shown | None = None, called: Callable[[], None] = lambda: None,
) -> Served:  # fmt: skip
    """Return the scores of `rows` (N, T) int64 on every path; decoding begins after `prompt` tokens.

    Each row begins with the question `shown`, if one is given.
    `batch_size` sequences are decoded side by side. With `autocast`, calls are under autocast of bf16. `called` runs
    after each call of the model.
    """
    model.eval()
    rows = rows.to(cast("Any", model).get_input_embeddings().weight.device)
    single = [row[None] for row in rows]

    def counted(rows: Tensor, *, use_cache: bool) -> Scores:
        scores = read(model, rows, use_cache=use_cache, shown=shown)
        called()
        return scores

    with torch.no_grad():
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=autocast):
            together = counted(rows, use_cache=False)
            alone = joined([counted(row, use_cache=False) for row in single])
        prompts = joined([counted(row, use_cache=True) for row in single])
        decoded = joined([_decode(model, batch, prompt, shown, called) for batch in torch.split(rows, batch_size)])
    return Served(together, alone, prompts, decoded)


class _Given(LogitsProcessor):
    """Lets `generate` choose the tokens of `rows`, and counts its calls."""

    def __init__(self, rows: Tensor, called: Callable[[], None]) -> None:
        self._rows, self._called = rows, called

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._called()
        wanted = self._rows[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted.to(scores.device), 0.0)


def _decode(model: nn.Module, rows: Tensor, prompt: int, shown: Shown | None, called: Callable[[], None]) -> Scores:
    """Return the scores (N, T - prompt) of the tokens after the prompt, from the logits of `generate`."""
    made: Any = cast("Any", model).generate(
        **arguments(rows[:, :prompt], shown, cast("Any", model).dtype),
        generation_config=_config(model, rows.shape[1] - prompt),
        logits_processor=LogitsProcessorList([_Given(rows, called)]),
    )
    assert torch.equal(made.sequences, rows), "`generate` takes the given tokens"
    return score(torch.stack(made.logits, dim=1), rows[:, prompt:])


def _config(model: nn.Module, new_tokens: int) -> Any:
    """Return the model's generation config, for greedy choices and without an end.

    `generate` puts the model's own end in the place of none, so the end is a token that no text has.
    """
    config = copy.deepcopy(cast("Any", model).generation_config)
    vocabulary = int(cast("Any", model).get_input_embeddings().weight.shape[0])
    config.update(
        max_new_tokens=new_tokens, min_new_tokens=None, do_sample=False, num_beams=1, num_return_sequences=1,
        temperature=1.0, top_p=1.0, top_k=50, eos_token_id=vocabulary, pad_token_id=0, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    return config
