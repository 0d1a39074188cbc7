"""Log likelihoods of given continuations: the ranking of multiple choice, and token accuracy.

Input: prompts with texts to follow them, as pairs of token ids. Output: a frozen `Likelihood` per pair. Nothing is
generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktc.inference.generate.answers import padded
from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.generate.prompts import Prompt
from ktc.model.hf.token_borders import TextTokens

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """`log` is the natural log probability of the continuation; `hits` of its `tokens` were the most probable."""

    log: float
    hits: int
    tokens: int


def continuations(tokenizer: Any, prompt: Prompt, texts: Sequence[str]) -> list[Pair]:
    """Return each text after the prompt as token ids: those before it, and its own.

    A text is tokenised together with its prompt, so its first token may hold the prompt's end. All texts begin after
    the same number of tokens; otherwise their likelihoods could not be compared. The very first token is never rated.
    """
    tokens = TextTokens(tokenizer, special=prompt.special)
    tokenised = [tokens.continued(prompt.text, text) for text in texts]
    begin = max(1, min(at for _, at in tokenised))
    return [(ids[:begin], ids[begin:]) for ids, _ in tokenised]


def likelihoods(opened: LanguageModel, pairs: Sequence[Pair], batch_size: int) -> list[Likelihood]:
    """Return the likelihood of each continuation after its prompt, by forward passes over `batch_size` of them."""
    rated: list[Likelihood] = []
    for start in range(0, len(pairs), batch_size):
        rated += _of_batch(opened, pairs[start : start + batch_size])
    return rated


def _of_batch(opened: LanguageModel, pairs: Sequence[Pair]) -> list[Likelihood]:
    """Return the likelihoods of one batch, right-padded. Logits are computed from the first continuation on."""
    import torch

    rows = [[*prompt, *continuation] for prompt, continuation in pairs]
    first = min(len(prompt) for prompt, _ in pairs) - 1
    kept = torch.arange(first, max(map(len, rows)), device=opened.device)
    with torch.no_grad():
        out: Any = opened.model(**padded(opened, rows, "right"), logits_to_keep=kept, use_cache=False)
    return [
        _likelihood(logits[len(prompt) - 1 - first :][: len(continuation)], continuation)
        for logits, (prompt, continuation) in zip(out.logits, pairs, strict=True)
    ]


def _likelihood(logits: Any, continuation: Sequence[int]) -> Likelihood:
    """Return one likelihood; `logits` [tokens, vocabulary], each row before its token of the continuation."""
    import torch

    wanted = torch.tensor(list(continuation), dtype=torch.long, device=logits.device)
    logs = torch.log_softmax(logits.float(), -1).gather(1, wanted[:, None]).sum()
    hits = (logits.argmax(-1) == wanted).sum()
    return Likelihood(float(logs), int(hits), len(continuation))
