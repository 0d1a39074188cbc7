"""Steps of a running batch as native programs: those of the model, while rows join and leave, and told where not."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_answers import Answers, alone, config_of
from recorded_steps import eager_graphs
from row_pairs import Pair
from torch import Tensor

import ktc
from ktc.foundation.host import find_compiler
from ktc.inference.serving import native_rows
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.native_rows import MOST_ROWS, NativeRows
from ktc.inference.serving.pages import LayerRow
from ktc.inference.serving.request import Limits, Request
from ktc.inference.serving.row_cache import CachedRow, RowCache
from ktc.model.attention.paged_tensor import PAGE
from ktc.model.steps.program import StepProgram

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module", params=["olmoe", "deepseek_v2"])
def model(request: pytest.FixtureRequest, inference_twin: Callable[[str], Path]) -> Any:
    return ktc.load(inference_twin(request.param))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[StepProgram]:
    """The programs that run from now on, once per step; recordings begin early."""
    found, run = list[StepProgram](), StepProgram.run

    def counted(program: StepProgram) -> None:
        if program.kept:  # not a part of one that is compared
            found.append(program)
        run(program)

    monkeypatch.setattr(StepProgram, "run", counted)
    monkeypatch.setattr(native_rows, "RECORDED_AFTER", 1)
    return found


def test_rows_join_and_leave_a_program_of_their_number(model: Any, programs: list[StepProgram]) -> None:
    pair, taken = Pair(model), [0]
    pair.take_turns(40, lambda: taken.append(len(programs)))
    taken = [after - before for before, after in itertools.pairwise(taken)]
    assert sum(count == 1 for count in taken) >= 30  # others are eager, recorded or compared
    assert len(set(map(id, programs[-8:]))) <= 2
    pair.require_same_rows()


def test_captured_steps_compute_what_eager_ones_do(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = eager_graphs()
    monkeypatch.setattr(model, "decode_graphs", graphs)
    pair = Pair(model)
    pair.take_turns(40)
    assert pair.batches[0].is_kept and not graphs._logged
    pair.require_same_rows()


def test_a_batch_that_outgrows_its_memory_is_recorded_again(model: Any, programs: list[StepProgram]) -> None:
    pair = Pair(model)
    pair.join(200)
    for _ in range(6):
        pair.step()
    first = programs[-1]
    pair.join(300)
    for _ in range(6):
        pair.step()
    assert programs[-1] is not first
    for _ in range(len(pair.batches[0].running)):
        pair.leave(0)
    pair.join(300)
    second = len(programs)
    for _ in range(4):
        pair.step()
    assert len(programs) > second


def test_room_for_longer_rows_is_neither_read_nor_computed(model: Any, programs: list[StepProgram]) -> None:
    pair = Pair(model)
    pair.join(20)
    for _ in range(4):
        pair.step()
    first, table = programs[-1], pair.batches[0]._rows.table
    table.pages = torch.zeros((table.pages.shape[0], 1024), dtype=torch.int32)
    table.renew()
    for _ in range(4):
        pair.step()
    assert programs[-1] is not first
    assert programs[-1].nbytes == first.nbytes


def test_programs_keep_no_memory_that_the_batch_has_left(model: Any, programs: list[StepProgram]) -> None:
    pair = Pair(model)
    for _ in range(3):
        pair.join(4 * PAGE)
    for _ in range(4):
        pair.step()
    batch = pair.batches[0]
    assert programs and batch.pool is not None
    old = [weakref.ref(tensor.untyped_storage()) for tensor in batch.pool.tensors]
    for _ in range(2):
        pair.leave(0)
    batch.compact()
    programs.clear()
    gc.collect()
    assert not any(storage() for storage in old)
    pair.step()


def test_more_rows_are_eager(model: Any, programs: list[StepProgram]) -> None:
    pair = Pair(model)
    for _ in range(MOST_ROWS + 1):
        pair.join(4)
    for _ in range(4):
        pair.step()
    assert not programs
    pair.leave(2)
    for _ in range(4):
        pair.step()
    assert programs


def test_the_engine_keeps_programs_from_one_request_to_the_next(model: Any, programs: list[StepProgram]) -> None:
    answers, config = Answers(), config_of(model)
    engine = Engine(ModelRunner(model), Limits(), answers)
    engine.start()
    for number in range(3):
        engine.submit(Request(str(number), (5, 9, 33, number + 7), 12, config))
        assert answers.wait(str(number))[0] == alone(model, (5, 9, 33, number + 7), config, 12)
    engine.change(engine.forget, idle=True)
    engine.stop()
    own = [each for each in programs if len(each.segments) == len(programs[0].segments)]
    assert len(set(map(id, own))) < len(own) / 4


def test_windows_and_faults_are_told(
    model: Any, programs: list[StepProgram], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native = NativeRows.of(model)
    assert native is not None
    rows, ids = RowCache(), torch.zeros(1, 1, dtype=torch.int64)
    row: Tensor = torch.zeros(2, 5, 4)
    rows.join(CachedRow(9, (LayerRow(row, row),), (6,)))
    monkeypatch.setattr(native._graphs, "_logged", set())
    assert native.logits(rows, ids) is None
    assert "L453" in caplog.text and "window" in caplog.text

    def failing(*_: Any) -> Any:
        raise ValueError("no luck")

    monkeypatch.setattr(native_rows, "record_step", failing)
    pair = Pair(model)
    pair.join(4)
    for _ in range(4):
        pair.step()
    assert not programs and "no luck (in running batches)" in caplog.text
