"""The steps of a trial: the uses of a loaded model, once each, on a few tokens.

In: a model with any weights, and the adapter of its rules if they have one. Out: the steps that ran, and the exceptions
of those that did not. A step that fails ends the trial only if the later ones need its result.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from ktc.diagnostics import listing
from ktc.model.hf.stock_model import vocabulary_of

TOKENS: Final = 8
NEW_TOKENS: Final = 4
_SEED: Final = 4711
_ATTACHING: Final = "attaching the adapter"  # the one step whose result the later ones need


def attempted(
    model: PreTrainedModel, lora: LoraConfig | None
) -> tuple[tuple[str, ...], Mapping[str, Exception]]:  # fmt: skip
    """Return the steps that ran, and the exception of each step that did not."""
    ran, failed = list[str](), dict[str, Exception]()
    for step, run in _steps(model, lora):
        try:
            run()
        except Exception as error:  # noqa: BLE001 - code of models and libraries raises anything
            failed[step] = error
            if step == _ATTACHING:
                break
        else:
            ran.append(step)
    return tuple(ran), failed


def _steps(model: PreTrainedModel, lora: LoraConfig | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each step, and the function that runs it before the next one is taken."""
    tokens = torch.randint(
        0, vocabulary_of(model), (1, TOKENS), generator=torch.Generator().manual_seed(_SEED), device="cpu"
    ).to(model.device)
    yield f"generating {NEW_TOKENS} tokens", lambda: _generate(model, tokens)
    if lora is None:
        return
    tuned = list[PeftModel]()
    yield _ATTACHING, lambda: tuned.append(cast("PeftModel", get_peft_model(model, copy.deepcopy(lora))))
    yield "a loss and its gradients", lambda: _backward(tuned[0], tokens)
    yield f"generating {NEW_TOKENS} tokens with the adapter", lambda: _generate(tuned[0], tokens)
    yield "saving and loading the adapter", lambda: _save_and_load(tuned[0])


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
        result = library.set_peft_model_state_dict(tuned, library.load_peft_weights(folder, device="cpu"))
    missing, unexpected = cast("tuple[list[str], list[str]]", (result.missing_keys, result.unexpected_keys))
    lost = [name for name in missing if "lora_" in name] + unexpected
    if lost:
        raise RuntimeError(f"the adapter does not come back: {listing(lost, 3)}")
