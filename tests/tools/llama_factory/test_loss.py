"""LLaMA-Factory's trainer has the stock loss where a known release only calls it (`test_training.py`: its classes)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer

from ktc.foundation import versions
from ktc.tools.llama_factory.run import passes_loss_on


class Stock(Trainer):
    def __init__(self, use_asft_loss: bool = False) -> None:
        self.finetuning_args = SimpleNamespace(use_asft_loss=use_asft_loss)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OfPairs(Stock):
    """Calls another loss, as its trainer for preferences does."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Changed(Stock):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def test_a_loss_that_calls_the_stock_one_is_known_by_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: "0.9.5")
    assert passes_loss_on(Stock, Stock())
    assert not passes_loss_on(Stock, Stock(use_asft_loss=True))
    assert not passes_loss_on(Stock, Changed())
    assert not passes_loss_on(OfPairs, OfPairs())
    monkeypatch.setattr(versions, "installed", lambda _: "0.9.6")
    assert not passes_loss_on(Stock, Stock())
