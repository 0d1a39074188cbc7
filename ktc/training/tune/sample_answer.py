"""One row of the data answered by the model before and after its training, for the report of the run.

In: the data as tokens, and the model on its trainer. Out: a frozen `SampleAnswer`. Answers are greedy and short. A
model that cannot answer leaves the sample out with a warning, and is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

import torch

from ktc.training.tune.labels import NOT_LEARNED
from ktc.training.tune.tokenised import TokenisedData
from ktc.training.tune.types import PreparedData

log = logging.getLogger(__name__)
_NEW_TOKENS: Final = 32
_LONGEST_PROMPT: Final = 512
_ROWS: Final = 100  # of which the first with a short prompt is taken
_CONTINUED: Final = 8  # tokens that are the prompt of a row that is learned as a whole


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """The prompt and the expected answer of a row, and the answers of the model. `held_out`: it did not learn from it.

    An answer of None was not given.
    """

    prompt_ids: tuple[int, ...]
    prompt: str
    expected: str
    held_out: bool
    before: str | None = None
    after: str | None = None


def sample_of(data: PreparedData, tokenizer: Any) -> SampleAnswer | None:
    """Return the first row with a short prompt, of the held-out data where there are some; None for no such row."""
    rows = data.held_out or data.train
    for ids, answer in _rows(rows):
        if 0 < len(ids) <= _LONGEST_PROMPT and answer:
            decode: Any = tokenizer.decode
            return SampleAnswer(
                tuple(ids), decode(ids, skip_special_tokens=True), decode(answer, skip_special_tokens=True),
                data.held_out is not None,
            )  # fmt: skip
    return None


def _rows(data: TokenisedData) -> Iterable[tuple[list[int], list[int]]]:
    """Yield the prompt and the first answer of rows, as tokens. An answer that was judged bad is left out."""
    for at, (ids, labels) in enumerate(zip(data.input_ids[:_ROWS], data.labels[:_ROWS], strict=True)):
        if (data.good and not data.good[at]) or (data.images and data.images[at].files):
            continue
        begin = next((i for i, label in enumerate(labels) if label != NOT_LEARNED), len(labels))
        if begin == 0:
            begin = min(_CONTINUED, len(ids) // 2)
        yield ids[:begin], list(takewhile(lambda label: label != NOT_LEARNED, labels[begin:]))


def answered(sample: SampleAnswer, trainer: Any, tokenizer: Any, *, after: bool) -> SampleAnswer:
    """Return the sample with the answer of the trainer's model, as it is now."""
    try:
        text = _answer(trainer, tokenizer, sample.prompt_ids)
    except Exception as error:  # noqa: BLE001  # a sample must not end a run
        log.warning("no sample answer for the report: %s: %s", type(error).__name__, error)
        return sample
    return replace(sample, after=text) if after else replace(sample, before=text)


def _answer(trainer: Any, tokenizer: Any, prompt: tuple[int, ...]) -> str:
    from transformers import GenerationConfig

    model = trainer.model
    was_training: bool = model.training
    ids = torch.tensor([prompt], device=model.get_input_embeddings().weight.device)
    ends: Any = model.generation_config.eos_token_id
    config = GenerationConfig(
        max_new_tokens=_NEW_TOKENS, do_sample=False,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends, pad_token_id=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    model.eval()
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            generated = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        model.train(was_training)
    return str(tokenizer.decode(generated[0, len(prompt) :], skip_special_tokens=True))
