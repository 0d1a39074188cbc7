"""Weights cut for the NUMA nodes of a machine: the same bits as on one node, whatever is computed, stored or loaded."""

from __future__ import annotations

import json
import mmap
import os

import pytest
import torch
from kernel_layers import FORMS, ISAS, Layer, Load, experts_of, random_layer, run, spec_of

from ktc.foundation import host
from ktc.foundation.host import NumaNode
from ktc.model.experts.layouts.stock_layout import parts_of
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.model.kernels.kernel_library import nodes_for

SPEC = spec_of(ISAS[0])


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """As if this machine had so many nodes of eight CPUs at least: all are the one that it has."""
    invented = (NumaNode(0, tuple(sorted(os.sched_getaffinity(0))) * 8),) * request.param
    monkeypatch.setattr(host, "numa_nodes", lambda: invented)
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    return request.param


def is_cut(module: FusedMoe) -> bool:
    (*_, of_nodes) = json.loads(module.weights.packed.key)  # type: ignore[union-attr]
    return len(of_nodes) > 1


@pytest.mark.parametrize(("cpus", "threads", "cut"), [
    ((4, 4), 8, True), ((4, 4), 7, True), ((8, 1), 2, True), ((8, 1), 9, False), ((8, 1), 3, False),
    ((2, 2, 1), 4, False), ((8,), 8, False), ((4, 4), 1, False),
])  # fmt: skip
def test_a_node_without_cpus_for_its_share_of_threads_is_none(
    monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...], threads: int, cut: bool
) -> None:
    nodes = tuple(NumaNode(number, tuple(range(count))) for number, count in enumerate(cpus))
    monkeypatch.setattr(host, "numa_nodes", lambda: nodes)
    assert nodes_for(threads) == (nodes if cut else ())


@pytest.mark.parametrize("nodes", [2, 3], indirect=True)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[-1]])
def test_any_number_of_nodes_gives_the_same_bits(load: Load, form: str, nodes: int) -> None:
    layer, spec = random_layer(200, 150, 6, 3, 45, form=form), spec_of(ISAS[0], form=form)
    whole = load(layer, spec, numa="none")
    alone = run(whole, layer)
    for options in ({"threads": nodes}, {"threads": 5}, {"threads": 3, "activations": "recompute"}):
        module = load(layer, spec, **options)
        assert is_cut(module)
        assert all(map(torch.equal, run(module, layer), alone)), options
        for expert in range(layer.num_experts):
            for part in parts_of(layer.form):
                assert torch.equal(module.expert(expert, part), whole.expert(expert, part))
        assert bytes(module.weights.packed_storage) == bytes(whole.weights.packed_storage)


@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_reads_shards(load: Load, isa: str, nodes: int) -> None:
    layer = random_layer(130, 70, 4, 2, 30)
    spec = spec_of(isa)  # type: ignore[arg-type]
    alone = run(load(layer, spec), layer)
    assert all(map(torch.equal, run(load(layer, spec, threads=nodes), layer), alone))


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_layer_may_have_fewer_panels_than_there_are_nodes(load: Load, nodes: int) -> None:
    layer = random_layer(17, 9, 3, 2, 5)
    assert all(map(torch.equal, run(load(layer, SPEC, threads=nodes), layer), run(load(layer, SPEC), layer)))


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_gradients_of_lora_are_the_same_bits(load: Load, nodes: int) -> None:
    layer = random_layer(70, 90, 5, 2, 29)

    def gradients(module: FusedMoe) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = ((4, 70), (180, 4)), ((4, 90), (70, 4))
        first, down = (
            Lora(*(torch.randn(5, *shape, generator=generator).requires_grad_() for shape in pair), 0.5)
            for pair in shapes
        )
        module(layer.x.bfloat16(), layer.index, layer.weights, ExpertsLora(first, down)).sum().backward()
        return [each.grad for each in (first.a, first.b, down.a, down.b)]  # type: ignore[misc]

    assert all(map(torch.equal, gradients(load(layer, SPEC, threads=nodes)), gradients(load(layer, SPEC))))


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_packed_store_is_good_for_any_number_of_nodes(load: Load, nodes: int) -> None:
    layer = random_layer(70, 90, 5, 2, 29)
    whole = load(layer, SPEC, numa="none")
    stored, expected = bytes(whole.weights.packed_storage), run(whole, layer)

    def empty(**options: object) -> FusedMoe:
        kernel = whole.weights.packed._kernel  # type: ignore[union-attr]
        return experts_of(5, 70, 90, 2, layer.form, kernel=kernel, **options)  # type: ignore[arg-type]

    def fill(target: memoryview) -> None:
        target[:] = stored

    for options in ({"threads": nodes}, {"threads": 1}, {"threads": 4, "numa": "none"}):
        read = empty(**options)
        assert read.packed_bytes == len(stored)
        read.weights.fill_packed(fill)
        assert is_cut(read) == (options == {"threads": nodes})
        assert all(map(torch.equal, run(read, layer), expected))
    mapping = mmap.mmap(-1, len(stored))
    mapping[:] = stored
    mapped = empty(threads=nodes)
    mapped.weights.take_packed(mapping)
    assert not is_cut(mapped)
    assert all(map(torch.equal, run(mapped, layer), expected))


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_threads_stay_on_their_node_and_the_caller_goes_home(load: Load, nodes: int) -> None:
    layer: Layer = random_layer(64, 96, 4, 2, 9)
    module = load(layer, SPEC, threads=nodes)
    before = os.sched_getaffinity(0)
    module(layer.x.bfloat16(), layer.index, layer.weights.float())
    assert os.sched_getaffinity(0) == before
