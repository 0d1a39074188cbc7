"""Counts are optimal: the published vectors, and every combination of small classes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from ktc.stages.choose.counts import ItemClass, best_counts, by_density


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters of one module of each class, how many there are, and the bytes of a weight outside the experts."""

    attention: int
    dense: int
    shared: int
    router: int
    head: int
    expert: int
    counts: tuple[int, ...]  # attention, dense, shared, router, head, experts
    top_k: int
    num_experts: int
    heads: int
    latent: int
    item: float


V2_LITE = Model(
    attention=13_762_560, dense=67_239_936, shared=17_301_504, router=131_072, head=209_715_200, expert=8_650_752,
    counts=(27, 1, 26, 26, 1, 26 * 64), top_k=6, num_experts=64, heads=16, latent=576, item=2.0,
)  # fmt: skip
V3 = Model(
    attention=187_105_280, dense=396_361_728, shared=44_040_192, router=1_835_008, head=926_679_040, expert=44_040_192,
    counts=(61, 3, 58, 58, 1, 58 * 256), top_k=8, num_experts=256, heads=128, latent=576, item=1.0,
)  # fmt: skip
GPU, HOST = (165e12, 1.008e12), (21e12, 440e9)  # FLOP/s and bytes/s: a card of 24 GB beside one socket


def seconds(flops: float, nbytes: float, engine: tuple[float, float]) -> float:
    return max(flops / engine[0], nbytes / engine[1])


def classes_of(model: Model, context: int) -> tuple[list[ItemClass], float]:
    """The classes of a decoding step of one sequence, and its seconds on the CPU alone."""
    cache = 2 * model.latent * context
    scores = 2 * context * model.heads * (2 * 512 + 64)
    rows = [("attention", model.attention, cache, scores), ("dense", model.dense, 0, 0), ("shared", model.shared, 0, 0)]
    rows += [("router", model.router, 0, 0), ("head", model.head, 0, 0)]
    items, total = list[ItemClass](), 0.0
    for (name, parameters, extra, flops), count in zip(rows, model.counts, strict=False):
        nbytes = model.item * parameters + extra
        on_cpu, on_gpu = (seconds(2 * parameters + flops, nbytes, engine) for engine in (HOST, GPU))
        items.append(ItemClass(name, count, round(nbytes), on_cpu - on_gpu))
        total += count * on_cpu
    share, nbytes = model.top_k / model.num_experts, 0.5625 * model.expert
    on_cpu, on_gpu = (seconds(2 * model.expert * share, nbytes * share, engine) for engine in (HOST, GPU))
    items.append(ItemClass("expert", model.counts[-1], round(nbytes), on_cpu - on_gpu))
    return items, total + model.counts[-1] * on_cpu


@pytest.mark.parametrize(
    ("model", "capacity", "experts", "alone_ms", "step_ms"),
    [(V2_LITE, 4e9, 342, 7.0, 3.84), (V2_LITE, 10.85e9, 1664, 7.0, 3.07), (V3, 22e9, 222, 63.6, 42.25)],
    ids=["V2-Lite in 4 GB", "V2-Lite whole", "V3 in 22 GB"],
)
def test_published_vectors(model: Model, capacity: float, experts: int, alone_ms: float, step_ms: float) -> None:
    items, alone = classes_of(model, 4096)
    best = best_counts(items, int(capacity))
    assert alone * 1e3 == pytest.approx(alone_ms, rel=0.01)
    assert (alone - best.gain) * 1e3 == pytest.approx(step_ms, rel=0.01)
    assert best.counts[:3] == model.counts[:3]  # all that every token uses; one router is as good as an expert's rest
    assert best.counts[3:5] == pytest.approx(model.counts[3:5], abs=1)
    assert best.counts[-1] == pytest.approx(experts, abs=2)


def test_no_combination_gains_more() -> None:
    drawn = random.Random(0)
    for _ in range(50):
        items = [
            ItemClass("", drawn.randint(0, 4), drawn.randint(1, 9), drawn.uniform(-0.2, 1))
            for _ in range(drawn.randint(1, 4))
        ]
        capacity = drawn.randint(0, 40)
        possible = (
            sum(n * item.gain for n, item in zip(counts, items, strict=True))
            for counts in itertools.product(*(range(item.count + 1) for item in items))
            if sum(n * item.nbytes for n, item in zip(counts, items, strict=True)) <= capacity
        )
        best, greedy = best_counts(items, capacity), by_density(items, capacity)
        most = max(possible)
        assert best.gain == pytest.approx(max(0.0, most))
        assert sum(n * item.nbytes for n, item in zip(best.counts, items, strict=True)) <= capacity
        assert most - greedy.gain <= greedy.gap + 1e-12


def test_many_classes_are_taken_by_density() -> None:
    items = [ItemClass(str(number), 9, 3 + number, 1.0) for number in range(9)]
    assert best_counts(items, 100) == by_density(items, 100)
