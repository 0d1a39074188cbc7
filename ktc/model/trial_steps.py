"""The steps of a trial: what users do with a loaded model, once each, on a few tokens.

In: a model with any weights, and the adapter of its rules if they have one. Out: the steps that ran, and the exception
of the step that did not.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from typing import Any, Final, cast

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from ktc.diagnostics import listing
from ktc.hf.stock_model import vocabulary_of

TOKENS: Final = 8
NEW_TOKENS: Final = 4
_SEED: Final = 4711
Failure = tuple[str, Exception]


def attempted(model: PreTrainedModel, lora: LoraConfig | None) -> tuple[tuple[str, ...], Failure | None]:
    """Return the steps that ran, and the first one that raised with its exception."""
    begun = list[str]()
    try:
        for step in _steps(model, lora):
            begun.append(step)
    except Exception as error:  # noqa: BLE001 - code of models and libraries raises anything
        return tuple(begun[:-1]), (begun[-1], error)
    return tuple(begun), None


def _steps(model: PreTrainedModel, lora: LoraConfig | None) -> Iterator[str]:
    """Yield the name of each step before it runs."""
    tokens = torch.randint(
        0, vocabulary_of(model), (1, TOKENS), generator=torch.Generator().manual_seed(_SEED), device="cpu"
    ).to(model.device)
    yield f"generating {NEW_TOKENS} tokens"
    _generate(model, tokens)
    if lora is None:
        return
    yield "attaching the adapter"
    tuned = cast("PeftModel", get_peft_model(model, copy.deepcopy(lora)))
    yield "a loss and its gradients"
    _backward(tuned, tokens)
    yield f"generating {NEW_TOKENS} tokens with the adapter"
    _generate(tuned, tokens)
    yield "saving and loading the adapter"
    _save_and_load(tuned)


def _generate(model: Any, tokens: Tensor) -> None:
    model.eval()
    model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip


def _backward(tuned: PeftModel, tokens: Tensor) -> None:
    """Take the gradients of the factors. Raises RuntimeError where the loss does not reach any."""
    tuned.train()
    tuned(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    factors = [p for p in tuned.parameters() if p.requires_grad]
    if not any(p.grad is not None for p in factors):
        raise RuntimeError("no factor of the adapter has a gradient")
    tuned.zero_grad()


def _no_card(folder: str) -> None:
    """Write no text for the hub, which takes longer than the adapter."""


def _save_and_load(tuned: PeftModel) -> None:
    """Write the adapter and read it back. Raises RuntimeError for factors that do not come back."""
    cast("Any", tuned).create_or_update_model_card = _no_card
    with tempfile.TemporaryDirectory() as folder:
        tuned.save_pretrained(folder)
        library = cast("Any", peft)
        found = library.set_peft_model_state_dict(tuned, library.load_peft_weights(folder, device="cpu"))
    missing, unexpected = cast("tuple[list[str], list[str]]", (found.missing_keys, found.unexpected_keys))
    lost = [name for name in missing if "lora_" in name] + unexpected
    if lost:
        raise RuntimeError(f"the adapter does not come back: {listing(lost, 3)}")
