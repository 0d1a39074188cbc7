"""Rows in pages: each keeps its tokens, equal beginnings are held once, and what nobody needs is free."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attention_reference import INT8_QUICK
from engine_answers import Answers, alone, config_of
from kernel_layers import built
from paged_caches import paged_model
from torch import Tensor

import ktc
from ktc.foundation.host import find_compiler
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import LayerRow
from ktc.inference.serving.request import Limits, Request
from ktc.inference.serving.row_cache import CachedRow, RowCache
from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.int8_decode import Int8DecodeAttention
from ktc.model.attention.int8_tensor import Int8Tensor, plain
from ktc.model.attention.paged_tensor import PAGE

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOW = 6
UNREAD = cast("DecodeAttention", None)  # a kernel that these tests do not call


class Rows:
    """A cache beside the same rows as plain tensors: two layers in pages, a window, and a layer without content."""

    def __init__(self, decode: DecodeAttention = UNREAD) -> None:
        self.cache = RowCache({0: decode, 1: decode, 2: decode})
        self.rows = list[Tensor]()
        self._draw = torch.Generator().manual_seed(3)
        self._is_coded = decode is not UNREAD

    def tokens(self, num: int) -> Tensor:
        return torch.randn(2, num, 8, generator=self._draw)

    def stored(self, row: Tensor) -> Tensor:
        return Int8Tensor.of(row) if self._is_coded else row

    def cached(self, row: Tensor) -> CachedRow:
        whole = LayerRow(self.stored(row), self.stored(-row))
        window = LayerRow(row[:, -WINDOW + 1 :], -row[:, -WINDOW + 1 :])
        other = LayerRow(self.stored(row[:1]), self.stored(row[:1, :, :3]))  # of other heads and widths
        return CachedRow(row.shape[1], (whole, other, window, None), (None, None, WINDOW, None))

    def join(self, row: Tensor, beginning: CachedRow | None = None) -> CachedRow:
        held = self.cache.hold(self.cached(row), beginning)
        self.cache.join(held)
        self.rows.append(row)
        return held

    def leave(self, at: int) -> None:
        self.cache.leave(at)
        self.rows[at] = self.rows[-1]
        self.rows.pop()

    def step(self) -> None:
        new = torch.stack([self.tokens(1) for _ in self.rows])
        columns = self.cache.columns + 1
        self.cache.begin_step()
        found = [self.cache.cache.update(new, -new, 0), self.cache.cache.update(new[:, :1], new[:, :1, :, :3], 1)]
        self.cache.cache.update(new, -new, 2)
        self.cache.appended()
        self.rows = [torch.cat(pair, dim=1) for pair in zip(self.rows, new, strict=True)]
        for at, row in enumerate(self.rows):
            length = row.shape[1]
            for (keys, values), part in zip(found, (row, row[:1]), strict=True):
                assert keys.shape[2] == columns
                assert torch.equal(plain(keys)[at, :, columns - length :], plain(self.stored(part)))
                assert not plain(values)[at, :, : columns - length].any()

    def check(self, at: int, held: CachedRow, row: Tensor) -> None:
        whole, other, window = (held.layer(index) for index in range(3))
        assert whole is not None and other is not None and window is not None and held.layer(3) is None
        assert torch.equal(plain(whole.keys), plain(self.stored(row)))
        assert torch.equal(plain(whole.values), plain(self.stored(-row)))
        assert torch.equal(plain(other.values), plain(self.stored(row[:1, :, :3])))
        assert torch.equal(window.keys, row[:, -WINDOW + 1 :])


@pytest.fixture(scope="module", params=["numbers", "codes"])
def decode(request: pytest.FixtureRequest) -> DecodeAttention:
    if request.param == "numbers":
        return UNREAD
    return Int8DecodeAttention(built(INT8_QUICK).kernel(INT8_QUICK[-1].entry), 1)


def test_rows_keep_their_tokens_through_joins_steps_and_leaves(decode: DecodeAttention) -> None:
    chance, rows = random.Random(1), Rows(decode)
    kept = list[tuple[CachedRow, Tensor]]()
    for turn in range(80):
        if len(rows.rows) < 2 or (len(rows.rows) < 6 and chance.random() < 0.3):
            begun, row = chance.choice([*kept, (None, rows.tokens(0))])
            if begun is not None:  # as a prompt that continues an earlier sequence
                begun = begun.first(chance.randrange(1, begun.length + 1)) if chance.random() < 0.5 else begun
                row = row[:, : begun.length]
            row = torch.cat([row, rows.tokens(chance.choice((1, 3, 20, PAGE - 2, 2 * PAGE)))], 1)
            kept.append((rows.join(row, begun), row))
        if len(rows.rows) > 1 and chance.random() < 0.25:
            at = chance.randrange(len(rows.rows))
            kept.append((rows.cache.row(at), rows.rows[at]))
            rows.leave(at)
        rows.step()
        if turn % 20 == 19:
            rows.cache.compact()
        at = chance.randrange(len(rows.rows))
        rows.check(at, rows.cache.row(at), rows.rows[at])
        for held, row in chance.sample(kept, min(3, len(kept))):
            rows.check(at, held, row)
        del kept[: max(0, len(kept) - 8)]


def test_equal_beginnings_are_held_once_and_unused_pages_are_free() -> None:
    rows = Rows()
    prompt = rows.tokens(3 * PAGE + 5)
    first = rows.join(prompt)
    pool = rows.cache.pool
    assert pool is not None and pool.used == 4
    second = rows.join(torch.cat([prompt[:, : 2 * PAGE + 7], rows.tokens(9)], 1), first.first(2 * PAGE + 7))
    assert second.pages[:2] == first.pages[:2] and second.pages[2] is not first.pages[2]
    assert pool.used == 5
    assert rows.cache.nbytes == pool.used * pool.page_bytes + sum(
        layer.nbytes for layer in cast("list[Any]", rows.cache.cache.layers)
    )
    rows.leave(0)
    del second
    assert pool.used == 5, "the first sequence is kept"
    del first
    gc.collect()
    assert pool.used == 3
    rows.leave(0)
    assert pool.used == 0 and rows.cache.nbytes == 0
    rows.join(prompt)
    rows.step()


def test_a_pool_of_which_little_is_used_is_made_smaller() -> None:
    rows = Rows()
    for _ in range(5):
        rows.join(rows.tokens(10 * PAGE))
    pool = rows.cache.pool
    assert pool is not None
    before = pool.nbytes
    for _ in range(4):
        rows.leave(0)
    rows.cache.compact()
    assert pool.nbytes == before // 4
    rows.check(0, rows.cache.row(0), rows.rows[0])
    rows.step()


def pages_of(engine: Engine) -> tuple[int, int]:
    """The number of used pages of the only batch, and the bytes of each."""
    pool = engine._worker.batches[""].pool
    assert pool is not None
    return pool.used, pool.page_bytes


SYSTEM = tuple(random.Random(2).choices(range(3, 500), k=2 * PAGE + 9))
PROMPTS = tuple((*SYSTEM, *random.Random(at).choices(range(3, 500), k=3 + 5 * at)) for at in range(6))


def answered(model: Any, *, shares: bool = True) -> list[list[int]]:
    """The answers to all prompts, of which five come when the first has been answered."""
    config, answers = config_of(model), Answers()
    engine = Engine(ModelRunner(model), Limits(prefix_bytes=1 << 26), answers)
    engine.start()
    for at, prompt in enumerate(PROMPTS):
        engine.submit(Request(str(at), prompt, 20, config))
        if not at:
            answers.wait("0")
    found = [answers.wait(str(at))[0] for at in range(len(PROMPTS))]
    used, page_bytes = engine.change(lambda: pages_of(engine), idle=True)
    if shares:
        # Two pages are all sequences'; each has one of its own, and another one that its answer may have begun.
        assert 2 + len(PROMPTS) <= used <= 2 + 2 * len(PROMPTS)
        assert engine.num_cached_tokens >= 5 * len(SYSTEM) and engine.prefix_bytes == used * page_bytes
    engine.change(engine.forget, idle=True)
    assert engine.prefix_bytes == 0 and not engine._worker.batches
    engine.stop()
    return found


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_requests_with_one_beginning_share_its_pages_and_answer_as_alone(family: str) -> None:
    model = paged_model(family)
    # A window has dropped the beginning's tokens, which are then read again.
    assert answered(model, shares=family != "gpt_oss") == [
        alone(model, prompt, config_of(model), 20) for prompt in PROMPTS
    ]


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_pages_hold_codes_of_a_compiled_model(inference_twin: Callable[..., Path]) -> None:
    model = ktc.load(inference_twin("olmoe", kv="int8"))
    assert all(len(tokens) == 20 for tokens in answered(model))
