"""Models with recurrent layers share no batch: their requests take turns, for a reason that names the layers."""

from __future__ import annotations

import pytest

from ktc.inference.serving.model_runner import ModelRunner
from ktc.model import twin

pytestmark = pytest.mark.usefixtures("one_thread")
OTHER_LAYERS = {
    "bailing_hybrid": "linear_attention",
    "granitemoehybrid": "linear_attention",
    "inkling2": "hybrid",
    "jamba": "linear_attention",
    "kimi_linear": "linear_attention",
    "lfm2_moe": "conv",
    "minimax": "DynamicCache",
    "nemotron_h": "linear_attention",
    "qwen3_5_moe": "linear_attention",
    "qwen3_next": "linear_attention",
    "qwen4_exp": "linear_attention",
    "zaya": "hybrid",
}
QUICK = ("lfm2_moe", "minimax")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OTHER_LAYERS]


@pytest.mark.parametrize("family", CASES)
def test_their_requests_take_turns(family: str) -> None:
    model = twin.build(twin.shrink(twin.default_config(family)), seed=1)
    assert OTHER_LAYERS[family] in ModelRunner(model).unbatched_reason
