"""A prompt that begins as an earlier sequence reads its rest only, and its answer is the same."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from decoding_models import stock_model
from engine_answers import Answers, alone, config_of
from transformers import GenerationConfig, PreTrainedModel

from ktc.inference.serving import prefix_cache
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import LayerRow
from ktc.inference.serving.prefix_cache import PrefixCache
from ktc.inference.serving.request import Limits, PixelKey, Request
from ktc.inference.serving.request_images import pixel_key
from ktc.inference.serving.row_cache import CachedRow
from ktc.model import twin

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


@pytest.mark.parametrize("family", ["gemma4", "kimi_k25", "aria"])
def test_the_same_image_is_read_once_and_another_is_never_taken_for_it(family: str) -> None:
    """One prompt with two images, each twice, and a question after the first answer: equal to stock."""
    model = twin.build(twin.shrink(twin.default_config(family, whole=True)), seed=0)
    config, answers, words = config_of(model), Answers(), torch.arange(5, 35)[None]
    asked = GenerationConfig.from_dict({**config.to_dict(), "max_new_tokens": 6})
    placeholder = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    engine = Engine(ModelRunner(model), Limits(prefix_bytes=1 << 24), answers)
    engine.start()
    images = [twin.with_image(model, words, seed) for seed in (0, 1)]
    assert torch.equal(images[0]["input_ids"], images[1]["input_ids"])
    wanted: list[list[int]] = []
    num_cached: list[int] = []
    for at, (seed, more) in enumerate(((0, 0), (1, 0), (0, 0), (1, 0), (0, 1))):
        given = dict(images[seed])
        if more:
            given["input_ids"] = torch.cat([given["input_ids"], torch.tensor([[*wanted[0], 7, 8]])], dim=1)
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            if (kinds := given.get("mm_token_type_ids")) is not None:
                given["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, 8)], dim=1)
        ids = given["input_ids"]
        wanted.append(cast("Any", model).generate(**given, generation_config=asked)[0, ids.shape[1] :].tolist())
        pixels = {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}
        key = pixel_key(ids, pixels, placeholder)
        assert key is not None and ids[0, key.first] == ids[0, key.last] == placeholder
        before = engine.num_cached_tokens
        engine.submit(Request(str(at), tuple(ids[0].tolist()), 6, config, pixels=pixels, pixel_key=key))
        assert answers.wait(str(at))[0] == wanted[-1]
        num_cached.append(engine.num_cached_tokens - before)
    engine.stop()
    length = images[0]["input_ids"].shape[1]
    assert wanted[0] != wanted[1]
    assert num_cached[:2] == [0, 0] and num_cached[4] >= length
    has_windows = family == "gemma4"  # which have dropped tokens of the prompt: it serves as a whole alone
    assert num_cached[2:4] == [0 if has_windows else length - 1] * 2


def test_a_beginning_within_an_image_is_not_taken() -> None:
    cache, key = PrefixCache(1 << 20), PixelKey(18, 25, (-1, -2, -3, -4))
    tokens = [*range(18), *[99] * 8, *range(4)]
    assert key.of(tokens) == [*range(18), -1, -2, -3, -4, *[99] * 4, *range(4)]
    few = torch.tensor([[5, 9, 1, 2, 9, 8]])  # images of one token, and words between them
    other = torch.tensor([[5, 9, 1, 3, 9, 8]])
    of_few, of_other = (pixel_key(ids, {"pixel_values": torch.ones(2)}, 9) for ids in (few, other))
    assert of_few is not None and of_other is not None
    assert of_few.of(few[0].tolist())[:5] != of_other.of(other[0].tolist())[:5]
    assert pixel_key(few, {"pixel_values": torch.ones(2)}, None) is None
    assert PixelKey(1, 2, (-1, -2, -3, -4)).of([7, 9, 9, 8]) == [7, -1, -2, 8]
    cache.add("", key.of(tokens), row(30))
    assert cache.length("", tokens, 0) == 18, "a text with the same beginning"
    for other, length in (([*tokens[:26], 50], 26), (tokens[:26], 0), ([*tokens[:20], 98], 0)):
        assert cache.length("", key.of(other), key.last + 1) == length
