"""Too little memory, failed steps and calls that no kernel takes: other rows and kept pages stay as they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from engine_answers import Answers, alone, config_of
from paged_caches import paged_model
from torch import Tensor
from transformers import GenerationConfig

from ktc.foundation.host import find_compiler
from ktc.inference.serving import worker
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.contiguous_kv import ContiguousKV
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import LayerRow, PageMemory, PagePool
from ktc.inference.serving.request import Limits, Request
from ktc.inference.serving.row_cache import CachedRow, RowCache
from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.paged_tensor import PAGE

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]
PAGED = {0: cast("DecodeAttention", None)}  # a layer whose attention is not computed here
PROMPTS = [tuple(random.Random(at).choices(range(3, 500), k=20 + 30 * at)) for at in range(4)]


@pytest.fixture(scope="module")
def model() -> Any:
    return paged_model("qwen3_moe")


@pytest.fixture
def config(model: Any) -> GenerationConfig:
    return config_of(model)


def failing(times: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which the first calls end for missing memory."""
    left = [times]

    def made(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise MemoryError("no more memory")
        return call(*given, **named)

    return made


def test_requests_of_other_adapters_survive_where_memory_cannot_be_released(
    model: Any, config: GenerationConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step without memory releases what is kept, and the smaller pool has no memory either."""
    answers = Answers()
    engine = Engine(ModelRunner(model), Limits(prefix_bytes=1 << 24), answers)
    engine.start()
    for at, prompt in enumerate(PROMPTS):
        engine.submit(Request(str(at), prompt, 12, config, adapter="other" if at % 2 else ""))
    monkeypatch.setattr(PagePool, "compact", failing(9, PagePool.compact))
    monkeypatch.setattr(RowBatch, "step", failing(1, RowBatch.step))
    for at, prompt in enumerate(PROMPTS):
        tokens, end = answers.wait(str(at))
        assert (tokens, end.error) == (alone(model, prompt, config, 12), "")
    engine.stop()
    assert "memory was missing to make a cache smaller" in caplog.text


def test_a_failed_step_ends_its_requests_and_leaves_kept_pages_to_the_next_ones(
    model: Any, config: GenerationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    engine = Engine(ModelRunner(model), Limits(prefix_bytes=1 << 24), answers)
    engine.start()
    prompt = tuple(random.Random(9).choices(range(3, 500), k=PAGE + 40))
    engine.submit(Request("first", prompt, 4, config))
    answers.wait("first")

    def broken(batch: RowBatch) -> Tensor:
        raise ValueError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(RowBatch, "step", broken)
        engine.submit(Request("broken", (*prompt, 5), 4, config))
        assert "a fault" in answers.wait("broken")[1].error
    engine.submit(Request("last", (*prompt, 6), 4, config))
    assert answers.wait("last")[0] == alone(model, (*prompt, 6), config, 4)
    batch = engine.change(lambda: engine._worker.batches[""], idle=True)
    assert batch.pool is not None and engine.prefix_bytes == batch.pool.used * batch.pool.page_bytes
    engine.stop()


def test_a_smaller_pool_that_cannot_be_made_leaves_rows_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, rows = torch.Generator().manual_seed(1), RowCache(PAGED)
    tensors = [torch.randn(2, 9 * PAGE + 5, 8, generator=draw) for _ in range(3)]
    for tensor in tensors:
        rows.join(CachedRow(tensor.shape[1], (LayerRow(tensor, -tensor),), (None,)))
    rows.leave(0)
    monkeypatch.setattr(PageMemory, "resize", failing(1, PageMemory.resize))
    with pytest.raises(MemoryError):
        rows.compact()
    for at, tensor in enumerate([tensors[2], tensors[1]]):
        found = rows.row(at).layer(0)
        assert found is not None and torch.equal(found.keys, tensor)
        assert rows.table.pages[at, :10].tolist() == [page.number for page in rows.table.rows[at]]


def test_a_row_without_memory_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys have joined their band, and values have no memory."""
    rows = RowCache(PAGED, room=1)

    def row(length: int) -> CachedRow:
        tensor = torch.randn(2, length, 8)
        return CachedRow(length, (LayerRow(tensor, tensor), LayerRow(tensor, tensor)), (None, None))

    rows.join(row(20))
    calls = [0]
    join = ContiguousKV.join

    def second_fails(band: ContiguousKV, of: Tensor) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError("no more memory")
        join(band, of)

    with monkeypatch.context() as patch:
        patch.setattr(ContiguousKV, "join", second_fails)
        with pytest.raises(MemoryError):
            rows.join(row(30))
    assert rows.lengths == [20] and len(rows.table.rows) == 1
    rows.begin_step()
    for index in range(2):
        keys, values = rows.cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), index)
        assert keys.shape == values.shape == (1, 2, 21, 8)


def test_kept_prompts_at_the_bound_of_unused_pages_do_not_move_at_every_request(
    model: Any, config: GenerationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized, resize = list[int](), PageMemory.resize

    def counted(memory: PageMemory, pages: int) -> None:
        if memory.tensors[0].shape[0] != pages:
            resized.append(pages)
        resize(memory, pages)

    monkeypatch.setattr(PageMemory, "resize", counted)
    monkeypatch.setattr(worker, "_MAX_IDLE_BYTES", 1)
    answers = Answers()
    runner = ModelRunner(model)
    engine = Engine(runner, Limits(prefix_bytes=7 * runner.size.nbytes(PAGE)), answers)
    engine.start()
    for at in range(14):
        prompt = tuple(random.Random(at).choices(range(3, 500), k=2 * PAGE + 9))
        engine.submit(Request(str(at), prompt, 3, config))
        answers.wait(str(at))
        if at == 8:
            resized.clear()
    engine.change(lambda: None, idle=True)
    engine.stop()
    assert not resized


def test_layers_whose_calls_no_kernel_takes_are_not_in_pages(config: GenerationConfig) -> None:
    """A call has such arguments (soft caps, weights to be returned), and its module does not show them."""
    model = paged_model("qwen3_moe")
    last = len(model.model.layers) - 1
    stock = model.model.layers[last].self_attn.forward
    model.model.layers[last].self_attn.forward = lambda *given, **named: stock(*given, **named, output_attentions=True)
    runner = ModelRunner(model)
    assert set(runner.paged) == set(range(last))
    answers = Answers()
    engine = Engine(runner, Limits(), answers)
    engine.start()
    for at, prompt in enumerate(PROMPTS):
        engine.submit(Request(str(at), prompt, 8, config))
    for at, prompt in enumerate(PROMPTS):
        assert answers.wait(str(at))[0] == alone(model, prompt, config, 8)
    engine.stop()


def test_windows_count_as_wide_as_the_longest_row() -> None:
    """They are contiguous beside layers in pages: each row takes the columns of the longest, up to the window."""
    runner = ModelRunner(paged_model("gpt_oss"))
    assert runner.paged and all(window is None for _, window in runner.size.paged)
    ((_, window), *_) = runner.size.contiguous
    assert window is not None
    all_layers, windows = (
        sum(nbytes for nbytes, _ in layers) for layers in (runner.size.paged, runner.size.contiguous)
    )
    lengths = [3, 2 * window]
    assert runner.size.batch_nbytes(lengths) == sum(lengths) * all_layers + 2 * window * windows


def test_a_row_that_is_held_joins_once() -> None:
    rows = RowCache(PAGED)
    tensor = torch.randn(2, PAGE + 3, 8)
    held = rows.hold(CachedRow(PAGE + 3, (LayerRow(tensor, tensor),), (None,)))
    rows.join(held)
    with pytest.raises(AssertionError, match="one page"):
        rows.join(held)
