"""The scheduler decides which prompts are prefilled and which sequences decode: no thread, no model, no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktc.inference.serving.cache_size import CacheSize
from ktc.inference.serving.request import Limits, Request
from ktc.inference.serving.scheduler import DecodeStep, PrefillChunk, Scheduler, SchedulerOutput

ONE_PER_TOKEN = CacheSize(paged=((1, None),))


def scheduler(size: CacheSize | None = ONE_PER_TOKEN, cached: int = 0, **limits: Any) -> Scheduler:
    """`cached` tokens of every prompt are in the prefix cache."""
    return Scheduler(Limits(**limits), size, lambda _, tokens: min(cached, len(tokens) - 1))


def add(of: Scheduler, *lengths: int, adapter: str = "", new: int = 5) -> None:
    """Add requests, whose names are their lengths."""
    for length in lengths:
        of.add(Request(str(length), tuple(range(length)), new, None, adapter=adapter))


def carry_out(of: Scheduler, decision: SchedulerOutput) -> None:
    """Report a decision as carried out: prompts that are complete run."""
    if isinstance(decision, PrefillChunk) and not (of._prefill and of._prefill.requests is decision.requests):
        for request in decision.requests:
            of.start(request.name)


def iterate(of: Scheduler) -> list[SchedulerOutput]:
    """One iteration whose passes all succeed, of prompts that are not cached."""
    passes = list[SchedulerOutput]()
    for decision in of.schedule():
        carry_out(of, decision)
        passes.append(decision)
    return passes


def shown(passes: Sequence[SchedulerOutput]) -> list[tuple[str, ...]]:
    """The names and columns of prefills, and the adapters of steps."""
    return [
        (*(request.name for request in each.requests), f"{each.start}:{each.stop}")
        if isinstance(each, PrefillChunk)
        else ("step", each.adapter)
        for each in passes
    ]


def running(of: Scheduler) -> set[str]:
    return {name for rows in of.running.values() for name in rows}


def test_an_iteration_prefills_and_then_takes_a_step_of_every_adapter() -> None:
    of = scheduler()
    add(of, 3)
    add(of, 9, adapter="tuned")
    assert shown(iterate(of)) == [("3", "0:3"), ("9", "0:9"), ("step", ""), ("step", "tuned")]
    assert iterate(of) == [DecodeStep(""), DecodeStep("tuned")]
    of.finish(["3"])
    assert iterate(of) == [DecodeStep("tuned")]
    of.finish(["9"])
    assert iterate(of) == [] and not of.has_work and of.live == ()


def test_prompts_of_like_lengths_are_prefilled_side_by_side_the_first_among_them() -> None:
    of = scheduler(prefill_chunk=64)
    add(of, 20, 14, 40, 21, 19)
    assert shown(iterate(of))[0] == ("20", "21", "19", "0:21")
    assert shown(iterate(of)) == [("14", "0:14"), ("40", "0:40"), ("step", "")]


def test_padding_of_a_prefill_is_bounded() -> None:
    of = scheduler(prefill_chunk=1000)
    add(of, 10, 100)
    assert shown(iterate(of))[:2] == [("10", "0:10"), ("100", "0:100")]


def test_adapters_are_not_prefilled_side_by_side() -> None:
    of = scheduler()
    add(of, 10)
    add(of, 11, adapter="tuned")
    add(of, 12)
    assert shown(iterate(of))[:2] == [("10", "12", "0:12"), ("11", "0:11")]


def test_a_prompt_longer_than_a_chunk_goes_on_in_the_next_iterations() -> None:
    of = scheduler(prefill_chunk=16)
    add(of, 40)
    assert [shown(iterate(of)) for _ in range(2)] == [[("40", "0:16")], [("40", "16:32")]]
    assert shown(iterate(of)) == [("40", "32:40"), ("step", "")]


def test_a_long_prompt_leaves_half_of_an_iteration_to_short_ones() -> None:
    of = scheduler(prefill_chunk=16)
    add(of, 160, 9, 30, 7, 120)
    assert shown(iterate(of))[:2] == [("7", "0:7"), ("160", "0:9")]
    assert shown(iterate(of))[:1] == [("160", "9:25")]  # 9 tokens are more than half a chunk


def test_a_small_rest_of_a_chunk_begins_no_prompt_that_it_would_cut() -> None:
    of = scheduler(prefill_chunk=16)
    add(of, 12, 40)
    assert shown(iterate(of)) == [("12", "0:12"), ("step", "")]
    assert shown(iterate(of)) == [("40", "0:16"), ("step", "")]


def test_no_more_sequences_run_than_the_batch_has_places() -> None:
    of = scheduler(batch=2)
    add(of, 10, 11, 12)
    assert shown(iterate(of)) == [("10", "11", "0:11"), ("step", "")]
    assert [request.name for request in of.waiting] == ["12"]
    of.finish(["10"])
    assert shown(iterate(of)) == [("12", "0:12"), ("step", "")]


def test_memory_is_reserved_for_the_longest_that_a_request_can_become() -> None:
    of = scheduler(cache_bytes=30)
    add(of, 10, 11, new=6)  # 15 and 16 tokens
    assert shown(iterate(of))[0] == ("10", "0:10")
    add(of, 9, new=6)
    assert shown(iterate(of)) == [("step", "")], "the first that waits is not overtaken for ever"
    of.finish(["10"])
    assert shown(iterate(of))[0] == ("11", "9", "0:11")


def test_contiguous_layers_reserve_the_longest_of_their_batch_for_every_row() -> None:
    size = CacheSize(paged=((1, None),), contiguous=((10, 8),))
    assert (size.has_windows, size.nbytes(4), size.nbytes(100)) == (True, 44, 180)
    assert size.batch_nbytes([4, 100]) == 104 + 2 * 80
    assert (size.max_tokens(44), size.max_tokens(43), size.max_tokens(180)) == (4, 3, 100)
    assert CacheSize(contiguous=((10, 8),)).max_tokens(80) is None


def test_cached_beginnings_count_as_computed() -> None:
    of = scheduler(cached=90, prefill_chunk=16)
    add(of, 100)
    (chunk, *_) = of.schedule()
    assert isinstance(chunk, PrefillChunk) and (chunk.start, chunk.stop) == (0, 10)


def test_cached_beginnings_are_not_side_by_side_in_a_cache_with_windows() -> None:
    for size, together in ((ONE_PER_TOKEN, True), (CacheSize(contiguous=((1, 8),)), False)):
        of = scheduler(size, cached=5)
        add(of, 10, 11)
        chunk = next(of.schedule())
        assert isinstance(chunk, PrefillChunk) and (len(chunk.requests) == 2) == together


def test_without_a_shared_cache_each_prompt_is_one_pass() -> None:
    of = scheduler(size=None, prefill_chunk=8, cache_bytes=1)
    add(of, 20, 21, 3)
    assert shown(iterate(of)) == [("20", "0:20"), ("step", "")]
    assert shown(iterate(of)) == [("21", "0:21"), ("step", "")]


def test_a_draining_scheduler_admits_nothing_and_completes_what_has_begun() -> None:
    of = scheduler(prefill_chunk=16)
    add(of, 20, 4)
    assert shown(iterate(of)) == [("4", "0:4"), ("20", "0:12"), ("step", "")]
    add(of, 5)
    of.is_draining = True
    assert shown(iterate(of)) == [("20", "12:20"), ("step", "")]
    of.finish(["20", "4"])
    assert iterate(of) == [] and not of.has_work
    of.is_draining = False
    assert shown(iterate(of))[0] == ("5", "0:5")


def test_a_request_that_ends_is_forgotten_wherever_it_is() -> None:
    of = scheduler(batch=1, prefill_chunk=16)
    add(of, 3)
    iterate(of)
    add(of, 40, 4)
    of.finish(["4", "unknown"])
    assert [request.name for request in of.waiting] == ["40"]
    of.finish(["3"])
    assert shown(iterate(of)) == [("40", "0:16")]
    of.finish(["40"])
    assert iterate(of) == [] and not of.has_work and of.live == ()


def test_rows_that_leave_a_prefill_stay_in_its_computation_until_the_last() -> None:
    of = scheduler(prefill_chunk=62)
    add(of, 20, adapter="tuned")
    add(of, 29, 30)
    assert shown(iterate(of))[:2] == [("20", "0:20"), ("29", "30", "0:21")]
    of.finish(["29"])
    (chunk, *_) = of.schedule()
    assert shown([chunk]) == [("29", "30", "21:30")]
    of.finish(["30", "20"])
    assert not of.has_work


def test_a_prefill_without_memory_is_tried_again_alone_and_then_given_up() -> None:
    of = scheduler()
    add(of, 10, 11)
    chunk = next(of.schedule())
    assert isinstance(chunk, PrefillChunk) and len(chunk.requests) == 2
    tokens = {request.name: request.tokens for request in chunk.requests}
    assert of.preempt_prefill(tokens) == ()
    assert [request.name for request in of.waiting] == ["10", "11"]
    first = next(of.schedule())
    assert shown([first]) == [("10", "0:10")]
    assert of.preempt_prefill({"10": range(10)}) == ("10",)
    of.finish(["10"])
    assert shown(iterate(of)) == [("11", "0:11"), ("step", "")]


def test_a_step_without_memory_runs_again_with_half_of_its_rows_and_their_tokens() -> None:
    of = scheduler(batch=4)
    add(of, 10, 11, 12, 13)
    iterate(of)
    add(of, 9)
    assert of.preempt_step({str(length): range(length + 3) for length in (10, 11, 12, 13)}) == ()
    assert [request.name for request in of.waiting] == ["10", "11", "12", "13", "9"]
    assert shown(iterate(of))[0] == ("10", "11", "0:14")
    of.finish(["10"])  # one more may run after each that ends
    assert shown(iterate(of))[0] == ("12", "13", "0:16")
    assert running(of) == {"11", "12", "13"}
    assert of.preempt_step({"11": range(20)}) == ("11",)


LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9), st.sampled_from(["", "tuned"])), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    requests=LENGTHS, batch=st.integers(1, 5), chunk=st.integers(1, 40), room=st.integers(70, 200), drawn=st.randoms()
)
def test_every_request_is_answered_within_the_limits_whatever_fails(
    requests: list[tuple[int, int, str]], batch: int, chunk: int, room: int, drawn: Any
) -> None:
    of = scheduler(batch=batch, prefill_chunk=chunk, cache_bytes=room)
    tokens = dict[str, list[int]]()
    left = dict[str, int]()
    for at, (length, new, adapter) in enumerate(requests):
        of.add(Request(str(at), tuple(range(length)), new, None, adapter=adapter))
        tokens[str(at)], left[str(at)] = list(range(length)), new
    computed = dict[str, int]()

    def add_token(names: Sequence[str]) -> None:
        for name in names:
            tokens[name].append(0)
            left[name] -= 1
        of.finish([name for name in names if not left[name]])

    for _ in range(3000):
        for decision in of.schedule():
            lacks_memory = drawn.random() < 0.1
            if isinstance(decision, PrefillChunk):
                names = [request.name for request in decision.requests if of.is_live(request.name)]
                assert len({request.adapter for request in decision.requests}) == 1
                assert decision.start == computed.pop(decision.requests[0].name, 0) < decision.stop
                if lacks_memory:
                    of.finish(of.preempt_prefill({name: tokens[name] for name in names}))
                elif decision.stop == max(len(tokens[request.name]) for request in decision.requests):
                    add_token(names)
                    for name in filter(of.is_live, names):
                        of.start(name)
                else:
                    computed[decision.requests[0].name] = decision.stop
            else:
                names = list(of.running[decision.adapter])
                if lacks_memory:
                    of.finish(of.preempt_step({name: tokens[name] for name in names}))
                else:
                    add_token(names)
            assert of.num_running <= batch
            reserved = sum(request.max_cached_tokens for rows in of.running.values() for request in rows.values())
            assert reserved <= room
        if not of.live:
            break
    assert of.live == () and not of.waiting and not of.has_work


@pytest.mark.parametrize("names", [["0"], ["0", "1"]])
def test_the_first_of_the_queue_is_never_passed_over_for_ever(names: list[str]) -> None:
    """A request without room holds back those behind it, which would take the room again and again."""
    of = scheduler(cache_bytes=50)
    add(of, 30, new=1)
    iterate(of)
    of.add(Request("large", tuple(range(40)), 1, None))
    for name in names:
        of.add(Request(name, (1, 2), 1, None))
    assert iterate(of) == [DecodeStep("")]
