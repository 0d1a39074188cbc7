"""A training says that packed weights stay frozen where base weights of their layer train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stacked_training import peft_model

from ktc.model.experts.trained import frozen_weights
from ktc.training.trainers.frozen_beside import warn_of_frozen

pytestmark = pytest.mark.usefixtures("one_thread")
SAID = "warning[L470]"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (lambda model: model, True),
        (lambda model: model.get_base_model().model, True),
        (lambda model: model.get_base_model().model.layers[-1], True),
        (lambda model: model.get_base_model().model.layers[-1].mlp, True),
        (lambda model: model.get_base_model().model.embed_tokens, False),
        (lambda model: None, False),
    ],
    ids=["PEFT's model", "the inner model", "a layer", "a block", "embeddings", "the adapter alone"],
)
def test_base_weights_that_train_beside_packed_ones_are_warned_of(
    package: Callable[[str], Path], caplog: pytest.LogCaptureFixture, part: Callable[[Any], Any], *, said: bool
) -> None:
    frozen_weights.forget_told()
    model: Any = peft_model(package("qwen3_moe"))
    if (chosen := part(model)) is not None:
        chosen.requires_grad_()
    warn_of_frozen(model)
    warn_of_frozen(model)
    assert caplog.text.count(SAID) == said
