"""The engine answers every request as if it were alone, whoever joins, leaves or fails beside it."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import pytest
import torch
from decoding_models import latent_modules, stock_model
from engine_answers import FAMILIES, PROMPTS, Served, alone, config_of
from transformers import GenerationConfig, PreTrainedModel

from ktc.inference.serving import worker
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.request import End, Event, Limits, Refused
from ktc.model import twin
from ktc.model.attention.absorbed import Absorption, absorb
from ktc.model.attention.decoding import decoding
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.attention.sparse import Sparse
from ktc.model.attention.sparsity import Sparsity

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> PreTrainedModel:
    return stock_model(request.param, torch.float32)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return stock_model("qwen3_moe", torch.float32)


@pytest.mark.parametrize("limits", [Limits(), Limits(batch=3, prefill_chunk=8)], ids=["together", "three in chunks"])
def test_a_busy_batch_gives_the_tokens_of_each_alone(family: PreTrainedModel, limits: Limits) -> None:
    config = config_of(family)
    counts = [24, 16, 12, 1, 7, 26]
    with Served(family, limits) as served:
        for at, (prompt, count) in enumerate(zip(PROMPTS, counts, strict=True)):
            served.ask(str(at), prompt, count, config)
        found = [served.answers.wait(str(at)) for at in range(len(PROMPTS))]
    assert [end for _, end in found] == [End("length")] * len(PROMPTS)
    assert [tokens for tokens, _ in found] == [
        alone(family, prompt, config, count) for prompt, count in zip(PROMPTS, counts, strict=True)
    ]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_without_memory_is_taken_again_with_fewer_rows(
    family: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    step, failed, config = RowBatch.step, list[int](), config_of(family)

    def failing(batch: RowBatch) -> torch.Tensor:
        scores = step(batch)  # some layers may have the token already
        if len(batch.running) > rows:
            failed.append(len(batch.running))
            raise MemoryError("cannot allocate 8,589,934,592 bytes")
        return scores

    monkeypatch.setattr(RowBatch, "step", failing)
    with Served(family, Limits(batch=8)) as served:
        for at, prompt in enumerate(PROMPTS):
            served.ask(str(at), prompt, 9, config)
        found = [served.answers.wait(str(at)) for at in range(len(PROMPTS))]
    assert [tokens for tokens, _ in found] == [alone(family, prompt, config, 9) for prompt in PROMPTS]
    assert failed and min(failed) == rows + 1


def test_a_request_that_has_no_memory_alone_is_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    step, config = RowBatch.step, config_of(model)

    def failing(batch: RowBatch) -> torch.Tensor:
        if any(len(each.request.tokens) == len(PROMPTS[1]) for each in batch.running):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12345 bytes")
        return step(batch)

    monkeypatch.setattr(RowBatch, "step", failing)
    with Served(model, Limits(batch=4)) as served:
        for at, prompt in enumerate(PROMPTS[:4]):
            served.ask(str(at), prompt, 6, config)
        found = [served.answers.wait(str(at)) for at in range(4)]
    assert [end.code for _, end in found] == ["", "out_of_memory", "", ""]
    assert [tokens for at, (tokens, _) in enumerate(found) if at != 1] == [
        alone(model, prompt, config, 6) for at, prompt in enumerate(PROMPTS[:4]) if at != 1
    ]


def test_requests_that_come_later_join_and_do_not_disturb(model: PreTrainedModel) -> None:
    config = config_of(model)
    with Served(model, Limits()) as served:
        later = iter(range(1, len(PROMPTS)))

        def ask_next(event: Event) -> None:
            if event.name == "0" and (at := next(later, None)) is not None:
                served.ask(str(at), PROMPTS[at], 6, config)

        served.answers.on_event = ask_next
        served.ask("0", PROMPTS[0], 20, config)
        found = [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]
    assert found[0] == alone(model, PROMPTS[0], config, 20)
    assert found[1:] == [alone(model, prompt, config, 6) for prompt in PROMPTS[1:]]


def test_draws_follow_the_seed_as_generate_does_whoever_runs_beside(model: PreTrainedModel) -> None:
    drawn = config_of(model, temperature=1.3, top_p=0.9, top_k=40, repetition_penalty=1.2)
    drawn.do_sample = True
    torch.manual_seed(11)
    expected = alone(model, PROMPTS[1], drawn, 12)
    with Served(model, Limits()) as served:
        for at, prompt in enumerate(PROMPTS):
            served.ask(f"beside {at}", prompt, 5 + at, config_of(model) if at % 2 else drawn, seed=at)
        served.ask("it", PROMPTS[1], 12, drawn, seed=11)
        assert served.answers.wait("it")[0] == expected
    with Served(model, Limits()) as served:
        served.ask("it", PROMPTS[1], 12, drawn, seed=11)
        assert served.answers.wait("it")[0] == expected


def test_an_end_token_ends_an_answer_and_belongs_to_it(model: PreTrainedModel) -> None:
    config = config_of(model)
    whole = alone(model, PROMPTS[0], config, 12)
    config.eos_token_id = [whole[5]]
    with Served(model, Limits()) as served:
        served.ask("0", PROMPTS[0], 12, config)
        served.ask("1", PROMPTS[1], 3, config_of(model))
        tokens, end = served.answers.wait("0")
    assert (tokens, end) == (whole[: whole.index(whole[5]) + 1], End("stop"))


def test_a_cancelled_request_leaves_and_the_others_go_on(model: PreTrainedModel) -> None:
    config = config_of(model)
    asked = threading.Event()
    with Served(model, Limits(batch=2)) as served:

        def cancel(event: Event) -> None:
            assert asked.wait(60)
            served.engine.cancel("0")
            served.engine.cancel("waiting")

        served.answers.on_event = cancel
        served.ask("0", PROMPTS[0], 400, config)
        served.ask("1", PROMPTS[1], 10, config)
        served.ask("waiting", PROMPTS[2], 400, config)
        served.ask("after", PROMPTS[3], 8, config)
        asked.set()
        assert served.answers.wait("waiting")[1] == served.answers.wait("0")[1] == End("cancelled")
        assert served.answers.wait("1")[0] == alone(model, PROMPTS[1], config, 10)
        assert served.answers.wait("after")[0] == alone(model, PROMPTS[3], config, 8)
        assert served.engine.num_running == served.engine.cache_bytes == 0


def test_a_fault_ends_the_requests_of_its_batch_and_the_engine_goes_on(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, step, faults = config_of(model), RowBatch.step, iter([True])

    def failing(batch: RowBatch) -> Any:
        if len(batch.running[0].tokens) > len(PROMPTS[0]) + 3 and next(faults, False):
            raise RuntimeError("out of luck")
        return step(batch)

    monkeypatch.setattr(RowBatch, "step", failing)
    with Served(model, Limits()) as served:
        for at in (0, 1):
            served.ask(str(at), PROMPTS[at], 20, config)
        ends = [served.answers.wait(str(at))[1] for at in (0, 1)]
        served.ask("after", PROMPTS[0], 20, config)
        assert served.answers.wait("after") == (alone(model, PROMPTS[0], config, 20), End("length"))
    assert [(end.finish, end.error) for end in ends] == [(None, "RuntimeError: out of luck")] * 2


def test_a_request_that_cannot_be_prepared_or_read_fails_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, logits = config_of(model), ModelRunner.logits

    def failing(runner: ModelRunner, ids: Any, *more: Any) -> Any:
        if ids.shape[1] == 23:
            raise RuntimeError("unreadable")
        return logits(runner, ids, *more)

    monkeypatch.setattr(ModelRunner, "logits", failing)
    wrong = config_of(model)
    wrong.do_sample, wrong.temperature = True, -1.0
    with Served(model, Limits()) as served:
        served.ask("0", PROMPTS[0], 8, config)
        served.ask("unread", PROMPTS[1], 8, config)
        served.ask("wrong", PROMPTS[2], 8, wrong)
        assert "unreadable" in served.answers.wait("unread")[1].error
        assert "temperature" in served.answers.wait("wrong")[1].error
        assert served.answers.wait("0")[0] == alone(model, PROMPTS[0], config, 8)


def test_what_does_not_fit_waits_and_what_never_fits_is_refused(model: PreTrainedModel) -> None:
    config = config_of(model)
    size = ModelRunner(model).size
    with Served(model, Limits(cache_bytes=size.nbytes(30))) as served:
        assert served.engine.max_length == 30
        with pytest.raises(Refused) as refused:
            served.ask("long", PROMPTS[1], 9, config)
        assert refused.value.reason == "too long"
        for at in range(4):
            served.ask(str(at), PROMPTS[at], 8, config)
        found = [served.answers.wait(str(at))[0] for at in range(4)]
    assert found == [alone(model, prompt, config, 8) for prompt in PROMPTS[:4]]


def test_requests_beyond_the_waiting_ones_are_refused(model: PreTrainedModel) -> None:
    config = config_of(model)
    with Served(model, Limits(batch=1, waiting=1)) as served:
        served.ask("0", PROMPTS[0], 400, config)
        served.ask("1", PROMPTS[0], 2, config)
        with pytest.raises(Refused) as refused:
            served.ask("2", PROMPTS[0], 2, config)
        assert refused.value.reason == "busy"
        served.engine.cancel("0")
        assert served.answers.wait("1")[1] == End("length")
        served.engine.stop()
        with pytest.raises(Refused) as refused:
            served.ask("3", PROMPTS[0], 2, config)
        assert refused.value.reason == "stopping"


def test_stopping_ends_what_runs(model: PreTrainedModel) -> None:
    with Served(model, Limits(batch=1)) as served:
        served.ask("0", PROMPTS[0], 400, config_of(model))
        served.ask("1", PROMPTS[0], 400, config_of(model))
    assert {served.answers.wait(name)[1] for name in "01"} == {End(None, "the server stops", "stopping")}


def test_a_long_prompt_leaves_half_of_each_turn_to_short_ones(model: PreTrainedModel) -> None:
    chance, config = random.Random(3), config_of(model)
    prompts = {"long": 160, "short": 9, "middle": 30, "other": 7, "later": 120}
    tokens = {name: tuple(chance.randrange(1, 64) for _ in range(length)) for name, length in prompts.items()}
    served, firsts = Served(model, Limits(prefill_chunk=16)), list[str]()
    served.answers.on_event = lambda event: firsts.append(event.name) if event.name not in firsts else None
    for name, prompt in tokens.items():
        served.ask(name, prompt, 40, config)
    with served:
        for name, prompt in tokens.items():
            assert served.answers.wait(name)[0] == alone(model, prompt, config, 40)
    # Of a turn's 16 tokens 8 are for prompts that they complete; longer ones keep their order.
    assert firsts[0] == "other"
    assert firsts.index("long") < firsts.index("later")
    assert firsts.index("long") < firsts.index("middle")


def test_changes_come_between_turns_or_when_nothing_runs(model: PreTrainedModel) -> None:
    config, seen = config_of(model), list[tuple[int, int]]()
    with Served(model, Limits()) as served:

        def look() -> None:
            seen.append((served.engine.num_running, len(seen)))

        started = threading.Event()
        served.answers.on_event = lambda _: started.set()
        served.ask("0", PROMPTS[0], 60, config)
        assert started.wait(60)
        served.engine.change(look)
        with pytest.raises(TimeoutError):
            served.engine.change(look, idle=True, patience=0)
        with pytest.raises(ZeroDivisionError):
            served.engine.change(lambda: 1 // 0)
        served.ask("1", PROMPTS[1], 8, config)
        served.engine.change(look, idle=True)
        assert served.answers.wait("0")[0] == alone(model, PROMPTS[0], config, 60)
        assert served.answers.wait("1")[0] == alone(model, PROMPTS[1], config, 8)
    assert [running for running, _ in seen[1:]] == [0]
    with pytest.raises(Refused):
        served.engine.change(look)


@pytest.mark.parametrize("name", ["qwen3_next", "llama4"])
def test_a_model_whose_cache_cannot_be_joined_answers_each_request_alone(name: str) -> None:
    model = stock_model(name, torch.float32)
    config, runner = config_of(model), ModelRunner(model)
    assert "layers of another kind" in runner.unbatched_reason
    with Served(model, Limits(prefill_chunk=8)) as served:
        for at, prompt in enumerate(PROMPTS[:3]):
            served.ask(str(at), prompt, 6, config)
        found = [served.answers.wait(str(at))[0] for at in range(3)]
    assert found == [alone(model, prompt, config, 6) for prompt in PROMPTS[:3]]


SPARSE = Sparsity(4, 2, 4, "int4", shared=False)


def sparse_model(model: PreTrainedModel, sparsity: Sparsity = SPARSE) -> PreTrainedModel:
    sparse: Any = copy.deepcopy(model)
    found = list(latent_modules(sparse))
    for module in found:
        of: Any = module
        sizes = LatentSizes(of.num_heads, of.qk_nope_head_dim, of.qk_rope_head_dim, of.v_head_dim, of.kv_lora_rank)
        absorb(module, Absorption(sizes, "kv_b_proj", "always", True), None, Sparse(sparsity, None))
    if not found:
        for layer in sparse.model.layers:
            decoding(layer.self_attn, None, Sparse(sparsity, None))
    return sparse


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_sparse_attention_in_a_running_batch_chooses_as_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    stock = stock_model(name, torch.float32)
    model, config = sparse_model(stock), config_of(stock)
    # Of up to `budget` tokens, or of more than an index serves at once: prompts are dense.
    prompts, counts = [*PROMPTS[:5], tuple(range(30, 39)), tuple(range(20, 60))], [24, 16, 12, 1, 7, 26, 20]
    with Served(model, Limits(batch=4)) as served:
        for at, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            served.ask(str(at), prompt, count, config)
        found = [served.answers.wait(str(at))[0] for at in range(len(prompts))]
    wanted = [alone(model, prompt, config, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert found == wanted
    assert wanted != [alone(stock, prompt, config, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert "stays dense" not in caplog.text


def test_prompts_of_like_lengths_are_read_side_by_side_and_the_first_is_among_them(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefilled, make = list[list[str]](), worker.PrefillBatch

    def recorded(runner: ModelRunner, generations: Any, beginnings: Any) -> Any:
        prefilled.append([each.request.name for each in generations])
        return make(runner, generations, beginnings)

    monkeypatch.setattr(worker, "PrefillBatch", recorded)
    lengths = {"first": 20, "short": 14, "long": 40, "like": 21, "other": 19}
    served = Served(model, Limits(prefill_chunk=64))
    for name, length in lengths.items():
        served.ask(name, range(5, 5 + length), 2, config_of(model))
    with served:
        for name, length in lengths.items():
            assert served.answers.wait(name)[0] == alone(model, tuple(range(5, 5 + length)), config_of(model), 2)
    assert prefilled == [["first", "like", "other"], ["short"], ["long"]]


def test_prompts_that_a_small_rest_of_a_chunk_would_cut_begin_with_the_next(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, logits = list[int](), ModelRunner.logits

    def counted(runner: ModelRunner, ids: Any, *more: Any) -> Any:
        passes.append(ids.numel())
        return logits(runner, ids, *more)

    served = Served(model, Limits(prefill_chunk=16))
    monkeypatch.setattr(ModelRunner, "logits", counted)
    for at, length in enumerate((12, 13, 40)):
        served.ask(str(at), range(5, 5 + length), 1, config_of(model))
    with served:
        for at in range(3):
            served.answers.wait(str(at))
    assert sum(passes) == 65
    assert 4 not in passes and passes[0] in (12, 13)


def whole(family: str) -> PreTrainedModel:
    """Return a small model with its towers."""
    return twin.build(twin.shrink(twin.default_config(family, whole=True)), seed=0)


@pytest.mark.parametrize("family", ["gemma4", "kimi_k25"])
def test_models_that_read_images_answer_text_together_where_a_position_is_one_number(family: str) -> None:
    model = whole(family)
    config = config_of(model)
    with Served(model, Limits()) as served:
        for at, prompt in enumerate(PROMPTS):
            served.ask(str(at), prompt, 8, config)
        found = [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]
    assert not ModelRunner(model).unbatched_reason
    assert found == [alone(model, prompt, config, 8) for prompt in PROMPTS]


def test_models_whose_positions_have_several_axes_answer_in_turns() -> None:
    assert "keeps the positions behind them" in ModelRunner(whole("qwen3_vl_moe")).unbatched_reason


@pytest.mark.parametrize("family", ["gemma4", "kimi_k25", "qwen3_vl_moe", "qwen3_5_moe"])
def test_prompts_with_images_have_stocks_answers_beside_others(family: str) -> None:
    model = whole(family)
    config, words = config_of(model), torch.arange(5, 30)[None]
    with_images = [twin.with_image(model, words, seed) for seed in (0, 1, 0)]
    asked = GenerationConfig.from_dict({**config.to_dict(), "max_new_tokens": 10})
    wanted: list[Any] = [model.generate(**given, generation_config=asked) for given in with_images]
    length = with_images[0]["input_ids"].shape[1]
    with Served(model, Limits(prefill_chunk=8, prefix_bytes=1 << 24)) as served:
        for at, given in enumerate(with_images):
            pixels = {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}
            served.ask(f"image {at}", given["input_ids"][0].tolist(), 10, config, pixels=pixels)
            served.ask(f"text {at}", PROMPTS[at], 12, config)
        found = [served.answers.wait(f"image {at}")[0] for at in range(len(with_images))]
        texts = [served.answers.wait(f"text {at}")[0] for at in range(len(with_images))]
        assert served.engine.num_cached_tokens == 0
    assert found == [answer[0, length:].tolist() for answer in wanted]
    assert found[0] == found[2] != found[1]  # equal tokens: no cache of prefixes mixes images
    assert texts == [alone(model, PROMPTS[at], config, 12) for at in range(len(with_images))]
