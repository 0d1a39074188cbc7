"""Questions put to a compiled model, without and with an adapter, and the answers scored by `ktc.workflows.metrics`.

In: a compiled model, an adapter, a held-out file. Out: what was said and the scores in percent. Answers are the model's
most likely words. `accuracy` is the share of answers that are the reference, letter by letter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ktc
from ktc.workflows import adapter as adapters
from ktc.workflows import metrics
from learning.results import Scores

MAX_NEW_TOKENS = 48
BATCH = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """`before` and `after` are the answers of the base and of the tuned model, in the order of `questions`."""

    questions: tuple[str, ...]
    wanted: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def base(self) -> Scores:
        return scores(self.before, self.wanted)

    @property
    def tuned(self) -> Scores:
        return scores(self.after, self.wanted)


def ask(out: Path, adapter: Path, held_out: Path) -> Asked:
    from transformers import AutoTokenizer

    chats = [json.loads(line)["messages"] for line in held_out.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(out, padding_side="left")
    model = ktc.load(out).eval()
    before = _answers(model, tokenizer, chats)
    after = _answers(adapters.attach(model, adapter).eval(), tokenizer, chats)
    questions, wanted = (tuple(chat[turn]["content"] for chat in chats) for turn in (0, 1))
    return Asked(questions, wanted, before, after)


def scores(said: Sequence[str], wanted: Sequence[str]) -> Scores:
    """BLEU and ROUGE as KTransformers defines them, and `accuracy`."""
    right = sum(one == other for one, other in zip(said, wanted, strict=True))
    found = {metric.name: metric.value for metric in metrics.definition("kt").measure(said, wanted)}
    return {**found, "accuracy": 100 * right / len(wanted)}


def _answers(model: Any, tokenizer: Any, chats: Sequence[Any]) -> tuple[str, ...]:
    said: list[str] = []
    for start in range(0, len(chats), BATCH):
        asked = [chat[:1] for chat in chats[start : start + BATCH]]
        texts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        rows = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            tokens = model.generate(
                input_ids=rows["input_ids"],
                attention_mask=rows["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        new = tokens[:, rows["input_ids"].shape[1] :]
        said += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return tuple(said)
