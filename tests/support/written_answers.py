"""Answers of a served model that are written beforehand: its engine chooses their tokens, whatever the logits are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ktc.inference.serving import generation


def write(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, text: str, pause: float = 0.0) -> None:
    """Answer every request with `text`, then an end; each token takes `pause` seconds."""
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def choose(generations: Sequence[Any], *_: Any) -> tuple[Tensor, dict[int, Exception]]:
        time.sleep(pause)
        return torch.tensor([tokens[len(one.tokens) - len(one.request.tokens)] for one in generations]), {}

    monkeypatch.setattr(generation, "_chosen", choose)
