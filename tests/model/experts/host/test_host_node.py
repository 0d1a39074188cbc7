"""Experts as host functions: the kernel's results by a C function, and its errors where the step ends."""

from __future__ import annotations

import threading

import pytest
import torch
from kernel_layers import ISAS, Load, random_layer, spec_of
from lora_layers import adapt
from recorded_steps import call_at_once

from ktc.model.experts.called_module import CalledExperts
from ktc.model.experts.host import host_node
from ktc.model.experts.host.host_node import HostNodes, runtime_libraries
from ktc.model.experts.kept.kept_experts import KeptExperts
from ktc.model.experts.trained.lora import ExpertsLora

HERE = torch.device("cpu")


def test_a_host_function_computes_what_the_kernel_computes(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 9, seed=2), 5)
    layer = adapted.layer
    module = load(layer, spec_of(ISAS[0]))
    x, weights = layer.x.to(torch.bfloat16), layer.weights.float()
    for lora in (ExpertsLora(), adapted.lora):
        wanted = module(x, layer.index, weights, lora=lora)
        nodes = HostNodes(call_at_once)
        with nodes.recorded(module.step_context):
            found = module(x, layer.index, weights, lora=lora).clone()
            wider = module(x, layer.index.repeat(1, 2), weights.repeat(1, 2) / 2, lora=lora).clone()
        assert torch.equal(found, wanted)
        assert float((wider - wanted).float().norm() / wanted.float().norm()) <= 0.01
        nodes.check(lambda _: "")
    assert module.step_context.host_nodes is None


def test_experts_that_are_called_with_rows_of_zero_compute_the_others_in_a_recorded_step(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer(70, 37, 5, 1, 3, seed=2)
    module = load(layer, spec_of(ISAS[0]))
    experts = CalledExperts(module.weights, {"hidden_states": "hidden"}, "by_expert")
    rows = torch.zeros(5, 3, 70, dtype=torch.bfloat16)
    rows[layer.index[:, 0], torch.arange(3)] = layer.x.to(torch.bfloat16)
    wanted = experts(rows.view(15, 70))
    assert float(wanted.abs().sum()) > 0

    def waits(*_: object) -> None:
        raise AssertionError("a capture forbids code that waits for the GPU")

    monkeypatch.setattr(torch, "nonzero", waits)
    nodes = HostNodes(call_at_once)
    with torch.no_grad(), nodes.recorded(experts.step_context):
        found = experts(rows.view(15, 70)).clone()
    nodes.check(lambda _: "")
    assert torch.equal(found, wanted)
    with torch.no_grad(), nodes.recorded(experts.step_context), pytest.raises(ValueError, match="shapes") as error:
        experts(rows.view(15, 70)[:, :69].contiguous())
    assert error.value.__notes__


@pytest.mark.parametrize("places", [0, 2])
def test_experts_that_get_rows_of_zero_are_the_cpus_where_a_gpu_keeps_others(load: Load, places: int) -> None:
    layer = random_layer(70, 37, 5, 1, 3, seed=2)
    module = load(layer, spec_of(ISAS[0]))
    experts = CalledExperts(module.weights, {"hidden_states": "hidden"}, "by_expert")
    assert experts.weights.packed is not None
    store = KeptExperts([(experts.weights.packed, experts.form)], HERE, places, share=0.5, fixed=True)
    experts.kept = store.layers[0]
    rows = torch.zeros(15, 70, dtype=torch.bfloat16)
    rows[4] = 1
    nodes = HostNodes(call_at_once)
    with torch.no_grad(), nodes.recorded(experts.step_context):
        found = experts(rows).clone()
    nodes.check(lambda _: "")
    assert torch.equal(found, experts(rows)) and float(found[4].abs().sum()) > 0


def test_a_recorded_call_reads_what_its_memory_holds_when_it_runs(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 9, seed=2)
    module = load(layer, spec_of(ISAS[0]))
    x, weights = layer.x.to(torch.bfloat16), layer.weights.float()
    called: list[tuple[int, int]] = []
    nodes = HostNodes(lambda *call: called.append(call))
    with nodes.recorded(module.step_context):
        module(x, layer.index, weights)
    (memory,) = nodes._memories.values()
    memory.x.copy_(2 * x)
    for call in called:  # of a thread that Python does not know, as CUDA's is
        thread = threading.Thread(target=call_at_once, args=call)
        thread.start()
        thread.join()
    assert torch.equal(memory.out, module(2 * x, layer.index, weights))


def test_an_error_of_a_later_step_is_not_that_of_the_one_before(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 9, seed=2)
    module = load(layer, spec_of(ISAS[0]))
    called: list[tuple[int, int]] = []
    nodes = HostNodes(lambda *call: called.append(call))
    nodes.begin()  # of an earlier capture
    with nodes.recorded(module.step_context):
        module(layer.x.to(torch.bfloat16), layer.index, layer.weights.float())
    (memory,) = nodes._memories.values()
    numbers = list[int]()
    for index in (layer.index, layer.index + 5):  # both are under way when the first one is checked
        nodes.begin()
        numbers.append(nodes.begun)
        memory.index.copy_(index)
        call_at_once(*called[0])
    first, second = numbers
    nodes.check(lambda _: "layers.3", first)
    with pytest.raises(IndexError):
        nodes.check(lambda _: "layers.3", second)
    nodes.check(lambda _: "layers.3")


def test_an_expert_that_does_not_exist_is_told_with_its_layer(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 9)
    module = load(layer, spec_of(ISAS[0]))
    nodes = HostNodes(call_at_once)
    with nodes.recorded(module.step_context):
        module(layer.x.to(torch.bfloat16), layer.index + 5, layer.weights.float())
    with pytest.raises(IndexError) as error:
        nodes.check(lambda _: "model.layers.3.mlp.experts")
    assert "`model.layers.3.mlp.experts`" in str(error.value.__notes__)
    nodes.check(lambda _: "")  # once


def test_errors_of_all_layers_are_told_at_once(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 9)
    module = load(layer, spec_of(ISAS[0]))
    nodes, names = HostNodes(call_at_once), iter(("layers.1", "layers.2"))
    with nodes.recorded(module.step_context):
        for _ in range(2):
            module(layer.x.to(torch.bfloat16), layer.index + 5, layer.weights.float())
    with pytest.raises(IndexError) as error:
        nodes.check(lambda _: next(names))
    assert "`layers.1`" in error.value.__notes__[0] and "`layers.2`" in error.value.__notes__[1]
    nodes.check(lambda _: "")


def test_the_path_of_the_runtime_library_may_have_spaces() -> None:
    maps = """7f00-7f10 r-xp 00000000 08:01 99   /home/a b/nvidia/lib/libcudart.so.12
7f10-7f20 rw-p 00000000 00:00 0
7f20-7f30 r--p 00000000 08:01 98   /home/libcudart_notes/readme"""
    assert runtime_libraries(maps) == {"/home/a b/nvidia/lib/libcudart.so.12"}


def test_a_runtime_library_that_cannot_be_opened_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_node, "runtime_libraries", lambda _: {"/missing/libcudart.so"})
    host_node._launcher.cache_clear()
    with pytest.raises(RuntimeError, match="cannot be used"):
        host_node._launcher()
