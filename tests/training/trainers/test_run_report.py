"""The report of a run promises: JSON that every parser reads, and means over the steps that count."""

from __future__ import annotations

import json
import math

import pytest

from ktc.model.experts.streamed.stream_ring import StreamFigures
from ktc.training.trainers.phases import PHASES, StepTimes
from ktc.training.trainers.run_report import Logged, RunReport, StepTokens, phases, speed, traffic
from ktc.training.trainers.step_trace import timeline


def steps_of(*seconds: float) -> tuple[StepTimes, ...]:
    return tuple(StepTimes(each, dict.fromkeys(PHASES, each / len(PHASES)), ()) for each in seconds)


def test_a_loss_that_is_no_number_is_told_in_json_that_is_strict() -> None:
    history = (Logged(1, loss=0.5), Logged(2, loss=math.nan, grad_norm=math.inf), Logged(3, eval_loss=-math.inf))
    report = RunReport(
        model="m", steps=3, epochs=1.0, seconds=1.0, finished=True, speed=None, phases={}, experts={}, gpus=(),
        host_peak_rss=1, trainable_parameters=1, total_parameters=2, processes=1, micro_batch=1, accumulation=1,
        length=8, stacking="off", linears="packed", history=history, machine={}, versions={},
    )  # fmt: skip
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))["history"]
    assert [(line["loss"], line["eval_loss"], line["grad_norm"]) for line in found] == [
        (0.5, None, None), ("nan", None, "inf"), (None, "-inf", None),
    ]  # fmt: skip


def test_the_first_step_warms_up_and_does_not_count() -> None:
    steps = steps_of(9.0, 1.0, 3.0)
    tokens = [StepTokens(real=10 * n, padded=20 * n, learned=5 * n) for n in (1, 2, 4)]
    found = speed(steps, tokens, nominal=40)
    assert found is not None
    assert (found.steps, found.step_time, found.tokens_per_step, found.padded_per_step) == (2, 2.0, 30.0, 60.0)
    assert (found.tokens_per_second, found.nominal_tokens_per_second) == (15.0, 20.0)
    assert sum(phases(steps).values()) == pytest.approx(found.step_time)


def test_a_run_of_one_step_is_measured_by_it_and_of_none_not_at_all() -> None:
    found = speed(steps_of(2.0), [StepTokens(8, 8, 8)], nominal=8)
    assert found is not None
    assert found.tokens_per_second == 4.0
    assert speed((), [], nominal=8) is None
    assert phases(()) == {}


def test_traffic_is_per_step_and_compared_with_the_bus_alone() -> None:
    before = StreamFigures("cuda:0", sent=100, dropped=10, copying=1.0, waiting=0.5, bus_speed=50.0)
    after = StreamFigures("cuda:0", sent=500, dropped=30, copying=11.0, waiting=2.5, bus_speed=50.0)
    found = traffic(before, after, steps=4, seconds=16.0)
    assert (found.bytes_per_step, found.dropped_per_step, found.speed) == (100.0, 5.0, 40.0)
    assert (found.bus_share, found.waiting_per_step) == (0.5, 0.5)


def test_a_timeline_has_the_busy_share_of_each_lane() -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1_000_000, "dur": 250_000},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1_100_000, "dur": 400_000},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1_200_000, "dur": 800_000},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1_900_000, "dur": 100_000},
        {"ph": "M", "name": "process_name"},
    ]
    found = timeline(events)
    assert found.seconds == pytest.approx(1.0)
    shares = {lane: found.share(lane) for lane in found.lanes}
    assert shares == pytest.approx({"host": 0.5, "to the GPU": 0.8, "GPU": 0.1})
    assert timeline(()).lanes == {}
