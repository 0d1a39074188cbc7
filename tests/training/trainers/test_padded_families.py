"""Layers of families whose attention is their own compute padded batches, and show no token the padding behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stacked_training import StackingTrainer, assert_alike, trained
from torch.nn import functional
from torch.utils.data import SequentialSampler

from ktc.training.trainers import several_lengths
from ktc.training.trainers.stacking import Stacker, StackMode

pytestmark = pytest.mark.usefixtures("one_thread")


LENGTHS = (41, 37, 49, 36, 29, 12, 9, 5)  # more than the window of 32, and than the 16 positions that an index chooses


class InOrder(StackingTrainer):
    def __init__(self, *args: Any, mode: StackMode, **kwargs: Any) -> None:
        super().__init__(*args, mode=mode, **kwargs)
        self.stacker = Stacker(self, mode, chunk_tokens=120)

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize(
    "family",
    ["gpt_oss", "deepseek_v2", "deepseek_v32"],
    ids=["sinks and a window", "absorbed latent attention", "positions that an index chooses"],
)
def test_padding_to_a_multiple_changes_nothing(
    package: Callable[[str], Path], tmp_path: Path, chunks: list[list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch, family: str,
) -> None:  # fmt: skip
    pytest.importorskip(f"transformers.models.{family}")  # 5.6 has no V3.2
    monkeypatch.setattr(several_lengths, "_MULTIPLE", 8)
    if family == "deepseek_v32":  # of two heads, relu leaves many scores of exactly 0, among which topk takes any
        monkeypatch.setattr(functional, "relu", functional.softplus)
    out = package(family)
    settings: dict[str, Any] = {"lengths": LENGTHS, "trainer": InOrder, "max_steps": 1}
    ours = trained(out, tmp_path, "on", **settings)
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.padded
    assert chunks[-1] == [(3, 16), (3, 40), (2, 56)]
    assert_alike(ours, trained(out, tmp_path, "off", **settings), 1e-5)
