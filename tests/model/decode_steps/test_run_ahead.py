"""`generate` a step ahead: tokens, caches and random numbers of stock code's loop, the order of work, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from decoding_models import generated
from recorded_steps import call_at_once, record_eagerly
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ktc.model.decode_steps import step_memory, token_choice
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.decode_steps.step_ahead import PendingStep
from ktc.model.decode_steps.step_memory import length_of
from ktc.model.decode_steps.token_choice import EndedByHost, TokenChoice, drawn
from ktc.model.loading import compiled_model as loading


class _Steps:
    """Records steps, and logs their begins and waits."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: set[int] = set()  # numbers of the waits that raise

    def record(self, compute: Any, device: torch.device, *_: Any) -> Any:
        output, replay = record_eagerly(compute, device)

        def begin() -> Any:
            self.log.append("begin")
            replay()
            number = self.log.count("begin")

            def wait() -> None:
                self.log.append("wait")
                if number in self.fails:
                    raise RuntimeError(f"step {number} failed")

            return wait

        return output, begin


@pytest.fixture
def steps(compiled_model: Any, monkeypatch: pytest.MonkeyPatch) -> _Steps:
    steps = _Steps()
    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(StepRecorder(steps.record, "cpu", call_at_once)))
    return steps


@pytest.fixture
def by_stock_loop(compiled_model: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`generated` with the loop of stock code."""

    def generate(rows: int = 2, **options: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(TokenChoice, "of", classmethod(lambda *_: None))
            return generated(compiled_model, rows, **options)

    return generate


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.3},
        {"min_new_tokens": 9, "no_repeat_ngram_size": 2},
    ],
)
def test_tokens_and_caches_are_those_of_stock_codes_loop(
    compiled_model: Any, steps: _Steps, by_stock_loop: Callable[..., Any], rows: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    wanted = by_stock_loop(rows, return_dict_in_generate=True, **options)
    state = torch.get_rng_state()
    for end in (None, int(wanted.sequences[0, 9 + 11])):
        ended = options | {"eos_token_id": end, "return_dict_in_generate": True}
        torch.manual_seed(5)
        expected = by_stock_loop(rows, **ended)
        after = torch.get_rng_state()
        torch.manual_seed(5)
        answer = generated(compiled_model, rows, **ended)
        assert torch.equal(answer.sequences, expected.sequences)
        assert torch.equal(torch.get_rng_state(), after)
        caches = [found.past_key_values for found in (answer, expected)]
        assert length_of(caches[0]) == length_of(caches[1]) == answer.sequences.shape[1] - 1
        assert all(
            torch.equal(one.keys, other.keys) for one, other in zip(caches[0].layers, caches[1].layers, strict=True)
        )
    assert not options.get("do_sample") or not torch.equal(state, torch.random.manual_seed(5).get_state())


def test_a_step_begins_before_the_token_before_it_is_read(compiled_model: Any, steps: _Steps) -> None:
    streamer = Mock(BaseStreamer, put=lambda value: steps.log.append("token" if value.dim() == 1 else "prompt"))
    streamer.end.side_effect = lambda: steps.log.append("end")
    wanted = generated(compiled_model, 1, max_new_tokens=6)
    steps.log.clear()
    assert torch.equal(generated(compiled_model, 1, max_new_tokens=6, streamer=streamer), wanted)
    first = ["prompt", "token", "begin", "wait", "token"]  # of stock code
    assert steps.log == [*first, "begin", *3 * ["begin", "wait", "token"], "wait", "token", "end"]
    steps.log.clear()
    ended = generated(compiled_model, 1, max_new_tokens=6, streamer=streamer, eos_token_id=int(wanted[0, 9 + 2]))
    assert torch.equal(ended, wanted[:, : ended.shape[1]])
    tokens = ended.shape[1] - 9
    assert steps.log.count("token") == tokens <= 3 and steps.log[-1] == "end"
    assert steps.log.count("begin") == steps.log.count("wait") <= tokens


def test_a_streamer_has_the_tokens_of_all_rows(compiled_model: Any, steps: _Steps) -> None:
    put = list[Tensor]()
    wanted = generated(compiled_model, 3, streamer=Mock(BaseStreamer, put=put.append))
    assert torch.equal(torch.cat((put[0], torch.stack(put[1:], 1)), 1), wanted)


class _Ends(StoppingCriteria):
    """Ends the second row at the fifth token, and all of them at the eighth."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.given.append(input_ids.clone())
        count = input_ids.shape[1] - 9
        return torch.tensor([count >= 8, count >= 5])


def test_criteria_of_a_user_are_asked_as_by_stock_code(
    compiled_model: Any, steps: _Steps, by_stock_loop: Callable[..., Any]
) -> None:
    asked, wanted = (_Ends(), _Ends())
    never: dict[str, Any] = {"eos_token_id": 511, "min_new_tokens": 20}
    expected = by_stock_loop(stopping_criteria=StoppingCriteriaList([wanted]), **never)
    assert torch.equal(generated(compiled_model, stopping_criteria=StoppingCriteriaList([asked]), **never), expected)
    assert len(asked.given) == len(wanted.given) == 8
    assert all(torch.equal(one, other) for one, other in zip(asked.given, wanted.given, strict=True))
    token: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(expected[0, 14])])}
    assert torch.equal(generated(compiled_model, **token), by_stock_loop(**token))
    answers = iter([False] * 4 + [True] * 9)
    ended = EndedByHost(lambda: next(answers))
    assert generated(compiled_model, stopping_criteria=StoppingCriteriaList([ended])).shape[1] == 9 + 5


class _EndsRows(StoppingCriteria):
    """Ends rows apart, with the attribute for which stock code pads."""

    def __init__(self) -> None:
        self.eos_token_id = torch.tensor([511])

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        count = input_ids.shape[1] - 9
        return torch.tensor([count >= 6, count >= 12])


def test_rows_are_padded_for_any_criterion_that_has_an_end_token(
    compiled_model: Any, steps: _Steps, by_stock_loop: Callable[..., Any]
) -> None:
    ends: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([_EndsRows()]), "eos_token_id": None}
    wanted = by_stock_loop(**ends)
    assert bool((wanted[0, 9 + 6 :] == 0).all())
    assert torch.equal(generated(compiled_model, **ends), wanted)


class _Flat(LogitsProcessor):
    """Keeps the ids that it is given, which are in one piece."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.given.append((input_ids.view(-1), input_ids.flatten().clone()))
        return scores


@pytest.mark.parametrize("rows", [1, 2])
def test_ids_that_are_given_out_are_in_memory_of_their_own(compiled_model: Any, steps: _Steps, rows: int) -> None:
    flat = _Flat()
    ids = generated(compiled_model, rows, logits_processor=LogitsProcessorList([flat]))
    assert ids.is_contiguous() and ids.untyped_storage().nbytes() == ids.nbytes
    assert all(torch.equal(one, other) for one, other in flat.given)


def test_a_user_sees_the_length_of_the_cache_as_by_stock_code(
    compiled_model: Any, steps: _Steps, by_stock_loop: Callable[..., Any]
) -> None:
    def seen(generate: Callable[..., Any]) -> list[int]:
        cache, lengths = DynamicCache(config=compiled_model.config), list[int]()

        class Length(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
                lengths.append(cache.get_seq_length())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        generate(past_key_values=cache, stopping_criteria=StoppingCriteriaList([Length()]), max_new_tokens=8)
        streamed = DynamicCache(config=compiled_model.config)
        put = Mock(BaseStreamer, put=lambda _: lengths.append(streamed.get_seq_length()))
        generate(past_key_values=streamed, streamer=put, max_new_tokens=8)
        return lengths

    assert seen(lambda **options: generated(compiled_model, 1, **options)) == seen(lambda **o: by_stock_loop(1, **o))


def test_a_loop_that_ends_a_step_later_is_stock_codes(
    compiled_model: Any, steps: _Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generated(compiled_model, 1)
    monkeypatch.setattr(token_choice, "defers_stop", lambda _: True)
    monkeypatch.setattr(loading, "RunAhead", Mock(side_effect=AssertionError("stock code's loop goes on")))
    assert torch.equal(generated(compiled_model, 1), wanted)


@pytest.mark.parametrize("fails", [{3}, {3, 4}, {23}])
def test_an_error_of_a_step_leaves_the_cache_before_it(compiled_model: Any, steps: _Steps, fails: set[int]) -> None:
    cache, steps.fails = DynamicCache(config=compiled_model.config), fails
    with pytest.raises(RuntimeError, match=f"step {min(fails)} failed"):
        generated(compiled_model, past_key_values=cache)
    assert length_of(cache) == 9 + min(fails) - 1
    assert steps.log.count("wait") == steps.log.count("begin") == min(23, min(fails) + 1)
    steps.fails = set()
    generated(compiled_model)


class _Fails(LogitsProcessor):
    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ValueError("no scores")
        return scores


def test_an_error_of_a_step_comes_before_its_consequences(compiled_model: Any, steps: _Steps) -> None:
    for fails, error in (({4}, RuntimeError), (set[int](), ValueError)):
        steps.log.clear()
        cache, steps.fails = DynamicCache(config=compiled_model.config), fails
        with pytest.raises(error):
            generated(compiled_model, past_key_values=cache, logits_processor=LogitsProcessorList([_Fails(4)]))
        assert steps.log.count("wait") == steps.log.count("begin") == 4
        assert length_of(cache) == 9 + 3


@pytest.mark.parametrize("ahead", [True, False])
def test_a_cache_that_outgrows_its_memory_goes_on(
    compiled_model: Any,
    steps: _Steps,
    by_stock_loop: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    ahead: bool,
) -> None:
    monkeypatch.setattr(step_memory, "_SHORTEST", 4)
    recorder = StepRecorder(steps.record, "cpu", call_at_once, ahead=ahead)
    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(recorder))
    wanted = by_stock_loop(3, max_new_tokens=30)
    assert torch.equal(generated(compiled_model, 3, max_new_tokens=30), wanted)
    assert len(compiled_model.decode_graphs._memories) >= 2


def test_a_model_that_is_not_captured_any_more_goes_on(
    compiled_model: Any, steps: _Steps, by_stock_loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, again, calls = by_stock_loop(), DecodeGraphs.again, list[int]()

    def refused(self: DecodeGraphs, *given: Any) -> PendingStep | None:
        calls.append(1)
        if len(calls) == 5:
            self._settle()
            self._memories.clear()
            self._steps.clear()
            monkeypatch.setattr(self, "_captured", lambda *_: "it is not")
        return again(self, *given)

    monkeypatch.setattr(DecodeGraphs, "again", refused)
    answer: Any = generated(compiled_model, return_dict_in_generate=True)
    assert torch.equal(answer.sequences, wanted) and length_of(answer.past_key_values) == wanted.shape[1] - 1


def test_numbers_from_which_no_token_is_drawn_are_an_error(compiled_model: Any, steps: _Steps) -> None:
    class Nothing(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            self.calls += 1
            return scores * float("nan") if self.calls > 3 else scores

    with pytest.raises(RuntimeError, match="contains either"):
        generated(compiled_model, do_sample=True, logits_processor=LogitsProcessorList([Nothing()]))
    assert steps.log.count("begin") == steps.log.count("wait")


def test_tokens_are_drawn_as_by_multinomial() -> None:
    probabilities = torch.randn(4, 513, generator=torch.Generator().manual_seed(2)).softmax(-1)
    for seed in range(9):
        torch.manual_seed(seed)
        wanted = torch.multinomial(probabilities, 1)[:, 0]
        torch.manual_seed(seed)
        assert torch.equal(drawn(probabilities), wanted)
