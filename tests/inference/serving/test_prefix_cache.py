"""A prompt that begins as an earlier sequence reads its rest only, and its answer is the same."""

from __future__ import annotations

import pytest
import torch
from decoding_models import stock_model
from engine_answers import Answers, alone, config_of
from transformers import PreTrainedModel

from ktc.inference.serving import prefix_cache
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import LayerRow
from ktc.inference.serving.prefix_cache import PrefixCache
from ktc.inference.serving.request import Limits, Request
from ktc.inference.serving.row_cache import CachedRow

pytestmark = pytest.mark.usefixtures("one_thread")
SHARED = tuple(range(20, 44))


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return stock_model(request.param, torch.float32)


def test_answers_are_the_same_over_cached_beginnings(model: PreTrainedModel) -> None:
    config, answers = config_of(model), Answers()
    engine = Engine(ModelRunner(model), Limits(prefix_bytes=1 << 24), answers)
    engine.start()
    first = alone(model, SHARED, config, 20)
    # Behind the answer, within it, within the prompt, the prompt itself, and nothing in common.
    rounds = [[SHARED], [(*SHARED, *first, 5, 6), (*SHARED, *first[:3], 7), (*SHARED[:18], 9), SHARED, (4, 5)]]
    for at, prompts in enumerate(rounds):
        for prompt in prompts:
            engine.submit(Request(f"{at} {prompt}", prompt, 20, config))
        for prompt in prompts:
            assert answers.wait(f"{at} {prompt}")[0] == alone(model, prompt, config, 20)
    engine.stop()
    assert engine.num_cached_tokens >= 43 + 18


def row(length: int) -> CachedRow:
    values = torch.zeros(1, length, 2)
    return CachedRow(length, (LayerRow(values, values),), (None,))


def test_the_longest_beginning_of_the_same_adapter_is_found() -> None:
    cache = PrefixCache(1 << 20)
    cache.add("", range(20), row(20))
    cache.add("", range(30), row(30))
    cache.add("other", range(40), row(40))
    assert cache.nbytes == 2 * 8 * (30 + 40)
    for adapter, length in (("", 30), ("other", 40), ("third", 0)):
        assert cache.length(adapter, range(50)) == length
    found = cache.find("", [*range(25), 0, 0])
    assert found is not None and found.length == 25
    assert cache.length("", range(30)) == 29
    assert cache.length("", [*range(9), 0, *range(20)]) == 0


def test_the_least_recently_used_are_dropped() -> None:
    cache = PrefixCache(2 * 8 * 50)
    prompts = [[number, *range(19)] for number in range(3)]
    cache.add("", prompts[0], row(20))
    cache.add("", prompts[1], row(20))
    assert cache.find("", [*prompts[0], 1]) is not None
    cache.add("", prompts[2], row(20))
    assert [cache.length("", [*prompt, 1]) for prompt in prompts] == [20, 0, 20]
    cache.add("", range(60), row(60))
    assert cache.length("", range(60)) == 0


def test_sequences_that_begin_otherwise_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, compared, common = PrefixCache(1 << 20), list[int](), prefix_cache._common
    monkeypatch.setattr(prefix_cache, "_common", lambda *both: compared.append(1) or common(*both))
    for number in range(50):
        cache.add("", [number, *range(19)], row(20))
    assert not compared
    shared = list(range(100, 130))
    for number in range(50):
        cache.add("", [*shared, number], row(31))
    compared.clear()
    assert cache.length("", [*shared, 99]) == 30 and len(compared) == 1
    assert cache.length("", [*shared, 31, 0]) == 31
    cache.clear("")
    assert cache.nbytes == 0 and cache.length("", [*shared, 31, 0]) == 0


def test_a_window_that_has_dropped_tokens_serves_as_a_whole_only() -> None:
    values = torch.zeros(1, 7, 2)
    cache = PrefixCache(1 << 20)
    cache.add("", range(20), CachedRow(20, (LayerRow(values, values),), (8,)))
    assert cache.length("", range(30)) == 20
    assert cache.length("", [*range(19), 0, 0]) == 0
    assert cache.length("", range(20)) == 0
