"""Calls that run while Python goes on: their order, their results, and their errors."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from kernel_layers import ISAS, Layer, Load, random_layer, spec_of
from torch import Tensor

from ktc.experts import pending

SPEC = spec_of(ISAS[0])


def inputs_of(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    return layer.x.bfloat16(), layer.index, layer.weights.float()


def test_a_submitted_call_gives_what_the_call_gives(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 33)
    module = load(layer, SPEC)
    inputs = inputs_of(layer)
    expected = module(*inputs)
    waiting = [module.submit(*inputs) for _ in range(4)]
    assert all(torch.equal(each.wait(), expected) for each in waiting)
    assert all(each.done() for each in waiting)
    assert torch.equal(waiting[0].wait(), expected)


def test_the_caller_goes_on_meanwhile() -> None:
    may_end = threading.Event()

    def compute(x: Tensor) -> Tensor:
        assert may_end.wait(10)
        return x + 1

    first, second = (pending.submit(compute, torch.tensor([number])) for number in (1, 2))
    assert not first.done()
    assert not second.done()
    may_end.set()
    assert (first.wait().item(), second.wait().item()) == (2, 3)


def test_what_a_call_raises_is_raised_when_it_is_waited_for(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 3)
    module = load(layer, SPEC)
    x, index, weights = inputs_of(layer)
    wrong = module.submit(x, index + 9, weights)
    misshapen = module.submit(x[:, :5], index, weights)
    right = module.submit(x, index, weights)
    with pytest.raises(IndexError, match="this layer has experts 0 to 3"):
        wrong.wait()
    with pytest.raises(ValueError, match="expected hidden states"):
        misshapen.wait()
    assert torch.equal(right.wait(), module(x, index, weights))


def test_gradients_are_refused_not_lost(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 3)
    module = load(layer, SPEC)
    x, index, weights = inputs_of(layer)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="`submit` computes no gradients"):
        module.submit(x, index, weights)
    with torch.no_grad():
        out = module.submit(x, index, weights).wait()
    assert not out.requires_grad
    assert torch.equal(out, module(x, index, weights))


def test_a_forked_child_submits_too(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module = load(layer, SPEC, threads=2)
    inputs = inputs_of(layer)
    expected = module.submit(*inputs).wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(module.submit(*inputs).wait(), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_inputs_on_a_gpu(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 300)
    module = load(layer, SPEC)
    inputs = inputs_of(layer)
    expected = module(*inputs)
    far = tuple(each.cuda() for each in inputs)
    waiting = [module.submit(far[0] * 1, *far[1:]) for _ in range(5)]  # the memory of each input is free at once
    results = [each.wait() for each in waiting]
    assert all(result.device == far[0].device for result in results)
    assert all(torch.equal(result.cpu(), expected) for result in results)
