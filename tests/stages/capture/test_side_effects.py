"""A block has a side effect if its call leaves more behind than a result; a graph could not carry it."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation

from ktc.stages.capture.forms import UNSUPPORTED, form_of
from ktc.stages.capture.side_effects import side_effect

KEPT: list[Tensor] = []
LOCAL = threading.local()
NAMES = SimpleNamespace(calls=0)
CALLS = {"all": 0}
STEP = ContextVar("STEP", default=0)


class Tally:
    """Statistics outside of a module."""

    total = 0

    def __init__(self) -> None:
        self.lengths: deque[int] = deque(maxlen=100)

    def note(self, x: Tensor) -> None:
        self.lengths.append(x.shape[0])


HEARD = Tally()
COUNTER = itertools.count()
QUEUE: queue.Queue[int] = queue.Queue()


@dataclass(slots=True)
class Slots:
    """Statistics without a dictionary."""

    calls: int = 0


class Block(nn.Module):
    def __init__(self, compute: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))
        self.register_buffer("counts", torch.zeros(8, device="meta"))
        self.counts: Tensor
        self.calls = 0
        self.losses: list[Tensor] = []
        self.tally, self.heard = Tally(), [HEARD.note]
        self.config = PreTrainedConfig()
        self.slots, self.array = Slots(), np.zeros(3)
        self.heard_layer, calls = nn.Identity(), [0]

        def count(*_: object) -> None:
            calls[0] += 1

        self.heard_layer.register_forward_hook(count)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def nothing(block: Block, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2] = x[:2]
    out.add_(x @ block.weight)
    return out.mul_(2)


def counting(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x


def counting_elsewhere(block: Block, x: Tensor) -> Tensor:
    CALLS["all"] += 1
    return x


def counting_in_an_object(block: Block, x: Tensor) -> Tensor:
    block.tally.lengths.append(3)
    return x


def counting_in_a_namespace(block: Block, x: Tensor) -> Tensor:
    NAMES.calls += 1
    return x


def counting_in_a_class(block: Block, x: Tensor) -> Tensor:
    Tally.total += 1
    return x


def counting_in_a_config(block: Block, x: Tensor) -> Tensor:
    block.config.calls = getattr(block.config, "calls", 0) + 1
    return x


def counting_in_a_function(block: Block, x: Tensor) -> Tensor:
    vars(counting_in_a_function)["calls"] = vars(counting_in_a_function).get("calls", 0) + 1
    return x


def counting_in_a_setting_of_its_own(block: Block, x: Tensor) -> Tensor:
    vars(block.config)["_calls"] = vars(block.config).get("_calls", 0) + 1
    return x


def counting_in_slots(block: Block, x: Tensor) -> Tensor:
    block.slots.calls += 1
    return x


def counting_in_an_array(block: Block, x: Tensor) -> Tensor:
    block.array[1] += 1
    return x


def counting_by_an_iterator(block: Block, x: Tensor) -> Tensor:
    next(COUNTER)
    return x


def putting_in_a_queue(block: Block, x: Tensor) -> Tensor:
    QUEUE.put(1)
    return x


def calling_a_layer_with_a_hook(block: Block, x: Tensor) -> Tensor:
    return block.heard_layer(x)


def drawing_from_python(block: Block, x: Tensor) -> Tensor:
    return x if random.random() < 0.98 else 0 * x


def drawing_from_numpy(block: Block, x: Tensor) -> Tensor:
    return x if np.random.rand() < 0.98 else 0 * x


def putting_it_on_its_result(block: Block, x: Tensor) -> Tensor:
    out = x @ block.weight
    vars(out)["loss"] = x.mean()
    return out


def counting_in_a_default(block: Block, x: Tensor, seen: list[int] = [0]) -> Tensor:  # noqa: B006 - the trap
    seen[0] += 1
    return x


def counting_in_a_context(block: Block, x: Tensor) -> Tensor:
    STEP.set(STEP.get() + 1)
    return x


def calling_back(block: Block, x: Tensor) -> Tensor:
    for listener in block.heard:
        listener(x)
    return x


def keeping(block: Block, x: Tensor) -> Tensor:
    block.loss = x.mean()
    return x


def appending(block: Block, x: Tensor) -> Tensor:
    block.losses.append(x.mean())
    return x


def keeping_elsewhere(block: Block, x: Tensor) -> Tensor:
    KEPT.append(x.mean())
    return x


def keeping_in_a_thread(block: Block, x: Tensor) -> Tensor:
    LOCAL.loss = x.mean()
    return x


def writing_a_buffer(block: Block, x: Tensor) -> Tensor:
    block.counts += 1
    return x


def writing_its_input(block: Block, x: Tensor) -> Tensor:
    x[0].mul_(2)
    return x


def keeping_while_gradients_are_on(block: Block, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        KEPT.append((x @ block.weight).mean())
    return x


def clipping_its_gradient(block: Block, x: Tensor) -> Tensor:
    out = x @ block.weight
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return out


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


def own_backward(block: Block, x: Tensor) -> Tensor:
    return Clipped.apply(x @ block.weight)


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (nothing, ""),
        (counting, "it changes `calls`"),
        (counting_elsewhere, "it changes `test_side_effects.CALLS`"),
        (counting_in_an_object, "it changes `tally.lengths`"),
        (counting_in_a_namespace, "it changes `test_side_effects.NAMES.calls`"),
        (counting_in_a_class, "it changes `test_side_effects.Tally.total`"),
        (counting_in_a_config, "it changes `config.calls`"),
        (counting_in_a_function, "it changes `compute.calls`"),
        (counting_in_a_setting_of_its_own, "it changes `config._calls`"),
        (counting_in_slots, "it changes `slots.calls`"),
        (counting_in_an_array, "it changes `array`"),
        (counting_by_an_iterator, "it changes `test_side_effects.COUNTER`"),
        (putting_in_a_queue, "it changes `test_side_effects.QUEUE.queue`"),
        (calling_a_layer_with_a_hook, "it changes `heard_layer.hooks.0().calls`"),
        (drawing_from_python, "it changes `random.getstate()`"),
        (drawing_from_numpy, "it changes `numpy.random.get_state()`"),
        (putting_it_on_its_result, "it puts `loss` on its result"),
        (counting_in_a_default, "it changes `compute().defaults`"),
        (counting_in_a_context, "it changes `test_side_effects.STEP`"),
        (calling_back, "it changes `heard.0.lengths`"),
        (keeping, "it keeps a result as its attribute `loss`"),
        (appending, "it keeps a result as its attribute `losses`"),
        (keeping_elsewhere, "it changes `test_side_effects.KEPT`"),
        (keeping_while_gradients_are_on, "it changes `test_side_effects.KEPT`"),
        (keeping_in_a_thread, "a tensor that it computes outlives its call"),
        (clipping_its_gradient, "it computes gradients in its own way"),
        (own_backward, "it computes gradients in its own way"),
        (writing_a_buffer, "it changes a tensor that it is given"),
        (writing_its_input, "it changes a tensor that it is given"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_side_effect_is_named(compute: Callable[[Block, Tensor], Tensor], reason: str) -> None:
    block, x = Block(compute), torch.empty(3, 8, device="meta")
    assert side_effect(block, lambda: block(x)) == reason


# Gate code of an experts module of transformers -----------------------------------------------------------------------
@use_experts_implementation
class Experts(nn.Module):
    def __init__(self, note: Callable[[Experts, Tensor], None]) -> None:
        super().__init__()
        self.note = note
        self.gate_up_proj = nn.Parameter(torch.empty(4, 12, 8, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(4, 8, 6, device="meta"))
        self.calls, self.losses = 0, list[Tensor]()

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        self.note(self, gate)
        return nn.functional.silu(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


def counts_calls(experts: Experts, _: Tensor) -> None:
    experts.calls += 1


def keeps_a_loss(experts: Experts, gate: Tensor) -> None:
    experts.loss = gate.square().mean()


def appends_a_loss(_: Experts, gate: Tensor) -> None:
    KEPT.append(gate.mean())


def counts_in_training(experts: Experts, _: Tensor) -> None:
    experts.calls += experts.training


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (counts_calls, "it changes `calls`"),
        (keeps_a_loss, "it keeps a result as its attribute `loss`"),
        (appends_a_loss, "it changes `test_side_effects.KEPT`"),
        (counts_in_training, "it changes `calls`"),
    ],
)
def test_gate_code_with_a_side_effect_has_no_form(note: Callable[[Experts, Tensor], None], reason: str) -> None:
    assert form_of(Experts(note)) == f"{UNSUPPORTED}the activation of `Experts` does more than compute: {reason}"


def test_gate_code_without_a_side_effect_has_a_form() -> None:
    assert form_of(Experts(lambda *_: None)) == "silu"
