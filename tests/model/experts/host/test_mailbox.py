"""Calls of experts that a GPU requests from a thread: here Triton's interpreter writes and reads the mailbox."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_layers import ISAS, Layer, Load, random_layer, spec_of
from recorded_steps import LastMoment, call_at_once

from ktc.model.experts.host import mailbox as mailbox_module
from ktc.model.experts.host.host_node import HostNodes
from ktc.model.experts.host.mailbox import Mailbox
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.lora import NO_LORA

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYER = random_layer(70, 37, 5, 2, 9, seed=2)


def served(order: Any = None) -> HostNodes:
    on_gpu = DEVICE.type == "cuda"
    return HostNodes(None if on_gpu else call_at_once, order or (None if on_gpu else LastMoment()), by_thread=True)


def inputs_of(layer: Layer) -> tuple[torch.Tensor, ...]:
    given = layer.x.to(torch.bfloat16), layer.index, layer.weights.float()
    return tuple(tensor.to(DEVICE) for tensor in given)


def computed(nodes: HostNodes, module: FusedMoe, *inputs: torch.Tensor) -> torch.Tensor:
    with nodes.recorded(module.step_context):
        out = module(*inputs)
    return out.cpu()  # waits


def only(nodes: HostNodes) -> Mailbox:
    (mailbox,) = nodes._mailboxes.values()
    assert mailbox is not None
    return mailbox


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_request_is_answered_with_the_kernels_result(load: Load) -> None:
    module, given = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER)
    nodes = served()
    for scale in (1.0, -2.0, 0.5):
        x, index, weights = given
        wanted = module(*(tensor.cpu() for tensor in (x * scale, index, weights)))
        assert torch.equal(computed(nodes, module, x * scale, index, weights), wanted)
    assert only(nodes)._thread.expected == 0
    nodes.check(lambda _: "")


def test_many_rows_are_answered_too(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 1200, seed=3)
    module, given = load(layer, spec_of(ISAS[0])), inputs_of(layer)
    wanted = module(*(tensor.cpu() for tensor in given))
    assert torch.equal(computed(served(), module, *given), wanted)


def test_an_error_of_a_call_is_told_and_the_thread_goes_on(load: Load) -> None:
    module, (x, index, weights), nodes = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), served()
    computed(nodes, module, x, index, weights)
    computed(nodes, module, x, index + 5, weights)
    with pytest.raises(IndexError) as error:
        nodes.check(lambda _: "layers.3")
    assert "`layers.3`" in str(error.value.__notes__)
    wanted = module(x.cpu(), index.cpu(), weights.cpu())
    assert torch.equal(computed(nodes, module, x, index, weights), wanted)
    nodes.check(lambda _: "")


def test_a_wait_in_vain_ends_with_an_error(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given, nodes = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), served()
    wanted = computed(nodes, module, *given)
    mailbox = only(nodes)
    mailbox.patience = 50
    with monkeypatch.context() as patch:  # the thread sleeps, since it expects nothing
        patch.setattr(mailbox, "_thread", _Absent())
        computed(nodes, module, *given)
    with pytest.raises(RuntimeError, match="has not answered"):
        nodes.check(lambda _: "")
    mailbox.patience = mailbox_module.PATIENCE
    assert torch.equal(computed(nodes, module, *given), wanted)
    nodes.check(lambda _: "")


def test_a_device_older_than_the_kernels_has_host_functions(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given, nodes = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), served()
    monkeypatch.setattr(mailbox_module, "lacking", lambda _: "cuda:0 is older than the kernels", raising=False)
    wanted = module(*(tensor.cpu() for tensor in given))
    assert torch.equal(computed(nodes, module, *given), wanted)
    assert [*nodes._mailboxes.values()] == [None]


def test_the_host_makes_the_first_call_before_the_trial(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given, nodes, seen = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), served(), list[torch.Tensor]()
    wanted = module(*(tensor.cpu() for tensor in given))
    monkeypatch.setattr(Mailbox, "answers", lambda _, memory, *more: seen.append(memory.out.clone()) or False)
    computed(nodes, module, *given)
    assert torch.equal(seen[0], wanted)


class _Absent:
    def expect(self, calls: int) -> None: ...
    def dismiss(self) -> None: ...


def test_a_device_without_answers_is_told_and_has_host_functions(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, given, nodes = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), served()
    mailbox_module._tell_of_functions.cache_clear()
    monkeypatch.setattr(Mailbox, "answers", lambda *_: False)
    wanted = module(*(tensor.cpu() for tensor in given))
    assert torch.equal(computed(nodes, module, *given), wanted)
    assert [*nodes._mailboxes.values()] == [None]
    assert ["L466" in record.getMessage() for record in caplog.records] == [True]


def test_a_replay_expects_what_was_captured_until_it_is_dismissed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given, nodes = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), served()
    computed(nodes, module, *given)
    mailbox = only(nodes)
    assert mailbox._captured == 0
    mailbox._captured = 3
    nodes.begin()
    assert mailbox._thread.expected == 3
    nodes.dismiss()
    assert mailbox._thread.expected == 0
    wanted = module(*(tensor.cpu() for tensor in given))
    assert torch.equal(computed(nodes, module, *given), wanted)
    assert mailbox._captured == 0, "recorded again"


def test_a_wait_ends_with_the_last_answer_or_when_the_gpu_has_failed(load: Load) -> None:
    module, given, nodes = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), served()
    computed(nodes, module, *given)
    mailbox, asked = only(nodes), list[bool]()
    assert not nodes.launched
    nodes.until_answered(lambda: pytest.fail("nothing is expected"))
    mailbox._captured = 2
    nodes.begin()

    def is_over() -> bool:
        asked.append(mailbox._thread.expected == 2)
        return len(asked) == 2

    nodes.until_answered(is_over)
    assert asked == [True, True]
    memory = nodes._free(*given)
    for _ in range(2):  # requests of a replay
        call = nodes._calls[0][1]
        mailbox_module._kernels().post(
            memory.words(*given), memory.seen_inputs, mailbox._call, mailbox._done, mailbox._ordered, call.address
        )
        until(lambda: int(mailbox._done[0]) == 1)
    nodes.until_answered(lambda: pytest.fail("all are answered"))
    assert mailbox._thread.expected == 0


def test_the_thread_ends_with_its_mailbox(load: Load) -> None:
    module, given, before = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER), threads()
    nodes = [served() for _ in range(3)]
    for one in nodes:
        computed(one, module, *given)
    assert threads() >= before + 3
    only(nodes[0])._thread.expect(5)  # it looks for requests
    del one, nodes
    gc.collect()  # the first one waits for two seconds
    until(lambda: threads() <= before + 1)  # one of the library's own may have begun


def threads() -> int:
    """The threads of this process, of which Python does not know all."""
    return len(os.listdir("/proc/self/task"))


def test_several_mailboxes_are_served_at_once(load: Load) -> None:
    module, (x, index, weights) = load(LAYER, spec_of(ISAS[0])), inputs_of(LAYER)
    packed, started = module.weights.packed, list[tuple[HostNodes, torch.Tensor, torch.Tensor]]()
    for _ in range(3):
        for scale in (1, 2, 3):
            nodes, given = served(), (x * scale, index, weights)
            memory = nodes._free(*given)
            call = packed.host_call(memory.x, memory.index, memory.weights, memory.out, NO_LORA, interleaved=False)
            out = nodes._started(packed, call, memory, given)
            started.append((nodes, out, module(*(tensor.cpu() for tensor in given))))
    for nodes, out, wanted in started:
        nodes._beside.join()
        assert torch.equal(out.cpu(), wanted)
