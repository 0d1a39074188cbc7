"""Code that asks about more than its inputs is left as it is: every row of the one list, however experts are written.

A row here is a question that code may ask, and its answer in some state is another. The quick tests ask the list
itself; the slow ones put each question into a list of experts, a loop over stacked tensors, decorated experts and their
gate, with a router that rules know and with one that they do not.
"""

from __future__ import annotations

import cProfile
import functools
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn
from torch import is_grad_enabled as learns
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ktc.stages.capture import markers
from ktc.stages.capture.circumstances import CIRCUMSTANCES, dependence
from ktc.stages.capture.export import BATCH, SEQUENCE
from ktc.stages.capture.forms import form_of, gate_dependence
from ktc.stages.capture.loop import capture_loop
from ktc.stages.capture.mentioned import Mentions, is_of_a_model
from ktc.stages.capture.own_experts import more_than_interface, own_experts

EXPERTS, HIDDEN, WIDTH, TOKENS = 3, 8, 6, 5
Asks = Callable[[nn.Module, Tensor, Tensor], object]  # of the module, one of its weights, and the hidden states

LEARNS = [torch.is_grad_enabled]
GRADED = functools.partial(torch.is_grad_enabled)
FLAGS, MODE, LOCAL = {"fast": False}, ContextVar("MODE", default=False), threading.local()
STATE = SimpleNamespace(fast=False)
REBOUND = False
ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu}
logger = logging.get_logger(__name__)


def set_fast() -> None:
    global REBOUND
    REBOUND = True


def helper() -> bool:
    return not is_grad_enabled()


def trains_last(module: nn.Module) -> bool:
    """Return whether the last parameter alone is trained, the same one of all members of a list."""
    trained = {re.sub(r"\d+\.", "", name): p.requires_grad for name, p in module.named_parameters()}
    return list(trained.values()).count(True) == 1 and list(trained.values())[-1]


def rounded(x: Tensor) -> bool:
    x.data = x.to(torch.float8_e4m3fn).to(x.dtype)
    return False


def unknown(x: Tensor) -> bool:
    raise NotImplementedError(f"no such kernel for {x.shape}")


FROZEN, OUTSIDE, PEFT = "or inputs are frozen", "is set from outside", "where PEFT has wrapped"
QUESTIONS: dict[str, tuple[Asks, str]] = {
    "a frozen weight": (lambda _, weight, __: not weight.requires_grad, FROZEN),
    "no weight is trained": (lambda module, _, __: not any(p.requires_grad for p in module.parameters()), FROZEN),
    "some weights are trained": (lambda module, _, __: len({p.requires_grad for p in module.parameters()}) > 1, FROZEN),
    "an input without gradient": (lambda _, __, x: not x.requires_grad, FROZEN),
    "an input without history": (lambda _, __, x: x.grad_fn is None, FROZEN),
    "the last weight alone": (lambda module, *_: trains_last(module), FROZEN),
    "a leaf": (lambda _, __, x: x.is_leaf, FROZEN),
    "a weight with a gradient": (lambda _, weight, __: weight.grad is not None, FROZEN),
    "by a text": (lambda _, weight, __: not getattr(weight, "requires_grad"), FROZEN),  # noqa: B009 - the question
    "gradients are off": (lambda *_: not torch.is_grad_enabled(), "without gradients"),
    "gradients are off, by a helper": (lambda *_: helper(), "without gradients"),
    "gradients are off, by another name": (lambda *_: not learns(), "without gradients"),
    "gradients are off, by a part of a function": (lambda *_: not GRADED(), "without gradients"),
    "gradients are off, by an attribute": (lambda *_: not LEARNS[0](), "without gradients"),
    "frozen and without gradients": (lambda _, w, __: not (w.requires_grad or torch.is_grad_enabled()), "something"),
    "training with gradients off": (lambda module, *_: module.training and not torch.is_grad_enabled(), "without grad"),
    "off and data": (lambda _, __, x: not torch.is_grad_enabled() and bool(x.isinf().any()), "without grad"),
    "fewer bits without gradients": (lambda _, __, x: not torch.is_grad_enabled() and rounded(x), "without grad"),
    "inference mode": (lambda *_: torch.is_inference_mode_enabled(), "in inference mode"),
    "a tensor of inference": (lambda _, __, x: x.is_inference(), "in inference mode"),
    "autocast": (lambda *_: torch.is_autocast_enabled("cpu"), "with autocast"),
    "the dtype of autocast": (
        lambda *_: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16, "autocast",
    ),
    "tracing": (lambda *_: torch.jit.is_tracing(), "reads whether it is traced"),
    "the state of tracing": (lambda *_: torch._C._get_tracing_state() is not None, "reads whether it is traced"),
    "compiling": (lambda *_: torch.compiler.is_compiling(), "under `torch.compile`"),
    "hooks": (lambda module, *_: len(module._forward_hooks) > 0, "where hooks are set"),
    "hooks with names": (lambda module, *_: len(module._forward_hooks_with_kwargs) > 0, "where hooks are set"),
    "hooks of all modules": (lambda *_: len(nn.modules.module._global_forward_hooks) > 0, "where hooks are set"),
    "hooks on gradients": (lambda module, *_: len(module._backward_hooks) > 0, "reads hooks on gradients"),
    "a parameter": (lambda _, weight, __: not isinstance(weight, nn.Parameter), PEFT),
    "its classes": (lambda module, *_: any(type(m).__name__.startswith("Param") for m in module.modules()), PEFT),
    "names of parameters": (lambda m, *_: any("original" in name for name, _ in m.named_parameters()), PEFT),
    "names of tensors": (lambda module, *_: any("original" in name for name in module.state_dict()), PEFT),
    "a missing text": (lambda module, *_: getattr(module, "calm", "exact") == "fast", OUTSIDE),
    "a missing number": (lambda module, *_: getattr(module, "calm", 0) > 10, OUTSIDE),
    "a missing table": (lambda module, *_: getattr(module, "calm", None) is not None and module.calm["x"], OUTSIDE),
    "a table of the file": (lambda *_: FLAGS["fast"], "`FLAGS` outside"),
    "an object of the file": (lambda *_: STATE.fast, "`STATE` outside"),
    "a variable of a context": (lambda *_: MODE.get(), "`MODE` outside"),
    "a variable of a thread": (lambda *_: getattr(LOCAL, "fast", False), "`LOCAL` outside"),
    "a name that a function binds": (lambda *_: REBOUND, "`REBOUND` outside"),
    "a missing attribute": (lambda module, *_: getattr(module, "calm", False), "`calm` is set from outside"),
    "an adapter": (lambda module, *_: hasattr(module, "lora_A"), "`lora_A` is set from outside"),
    "its dictionary": (lambda module, *_: vars(module).get("calm"), "attributes by name"),
    "strides": (lambda _, __, x: not x.is_contiguous(), "not contiguous"),
    "strides of a weight": (lambda _, weight, __: weight.stride(-1) != 1, "not contiguous"),
    "bf16": (lambda _, __, x: x.dtype == torch.bfloat16, "in another dtype"),
    "half precision": (lambda _, weight, __: weight.dtype == torch.float16, "in another dtype"),
    "a GPU": (lambda _, __, x: x.is_cuda, "on another device"),
    "the number of a GPU": (lambda _, __, x: x.get_device() >= 0, "on another device"),
    "the type of a GPU": (lambda _, __, x: "cuda" in x.type(), "on another device"),
    "a GPU alone": (lambda _, __, x: x.is_cuda and unknown(x), "on another device"),
    "a GPU without gradients": (lambda _, __, x: x.is_cuda and not torch.is_grad_enabled(), "on another device"),
    "a GPU, frozen": (lambda _, weight, x: x.is_cuda and not weight.requires_grad, "on another device"),
    "bf16, frozen": (lambda _, w, __: w.dtype == torch.bfloat16 and not w.requires_grad, "in another dtype"),
    "bf16 in inference mode": (
        lambda _, __, x: x.dtype == torch.bfloat16 and torch.is_inference_mode_enabled(), "in another dtype",
    ),
    "bf16 with autocast": (
        lambda _, __, x: x.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu"), "in another dtype",
    ),
    "bf16 on a GPU": (lambda _, __, x: x.dtype == torch.bfloat16 and x.is_cuda, "in another dtype"),
    "the CPU": (lambda _, weight, __: weight.device.type == "cpu", "on another device"),
    "the default dtype": (lambda *_: torch.get_default_dtype() == torch.bfloat16, "another default dtype"),
    "the environment": (lambda *_: os.environ.get("CALM"), "reads the environment"),
    "a variable": (lambda *_: os.getenv("CALM"), "reads the environment"),
    "a file": (lambda *_: os.path.exists("calm"), "reads files"),
    "a path": (lambda *_: Path("calm").exists(), "reads files"),
    "arguments": (lambda *_: "--calm" in sys.argv, "reads the interpreter"),
    "loaded modules": (lambda *_: "calm" in sys.modules, "reads the interpreter"),
    "a version": (lambda *_: torch.__version__ < "2", "reads versions"),
    "the time": (lambda *_: time.time() < 0, "reads the time"),
    "random numbers": (lambda module, *_: module.training and random.random() < 0, "random"),
    "threads": (lambda *_: torch.get_num_threads() > 10**6, "reads settings of torch"),
    "determinism": (lambda *_: torch.are_deterministic_algorithms_enabled(), "reads settings of torch"),
    "a GPU of the machine": (lambda *_: torch.cuda.is_available(), "reads the machine"),
    "a recording GPU": (lambda *_: torch.cuda.is_current_stream_capturing is None, "reads the machine"),
    "an address": (lambda _, weight, __: weight.data_ptr() == 1, "reads the memory"),
}  # fmt: skip
QUICK = (
    "a frozen weight", "some weights are trained", "gradients are off, by another name", "a tensor of inference",
    "autocast", "a missing text", "a table of the file", "off and data", "a GPU, frozen", "the last weight alone",
    "the environment", "half precision", "the CPU", "strides of a weight",
)  # fmt: skip
PLAIN: Asks = lambda *_: False  # noqa: E731


def test_every_row_of_the_list_has_a_question() -> None:
    told = {row.when for row in CIRCUMSTANCES}
    reasons = [reason for _, reason in QUESTIONS.values()]
    assert not [when for when in told if not any(r in f"reads {when}" or when.endswith(r) for r in reasons)]


class Small(nn.Module):
    """One layer that doubles its input where the answer is yes."""

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.asks, self.layer = asks, nn.Linear(HIDDEN, HIDDEN)
        self.weight, self.other = (nn.Parameter(torch.empty(HIDDEN, HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).to(x.dtype) + torch.zeros_like(x, device=x.device)
        return y @ (self.weight * 2 if self.asks(self, self.weight, x) else self.weight) + y @ self.other


def _dependence(asks: Asks) -> str:
    with torch.device("meta"):
        module, x = Small(asks).eval(), torch.empty(TOKENS, HIDDEN)

    def run(given: Callable[[Tensor], Tensor], inside: Callable[[], AbstractContextManager[object]]) -> object:
        with inside():
            return module(given(x))

    return dependence(module, run)


@pytest.mark.parametrize(
    "question", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in QUESTIONS]
)
def test_code_that_asks_is_told_by_its_question(question: str) -> None:
    asks, reason = QUESTIONS[question]
    assert reason in _dependence(asks)


@pytest.mark.slow
def test_code_that_asks_and_computes_the_same_is_not_told() -> None:
    def harmless(module: nn.Module, weight: Tensor, x: Tensor) -> bool:
        asked = weight.requires_grad, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), x.is_contiguous()
        # A constant, and tables of functions, are code.
        known = EXPERTS, ACTIVATIONS["silu"], ACT2FN["silu"], ALL_ATTENTION_FUNCTIONS, logger
        return (asked, x.dtype, x.device.type, isinstance(module, nn.Linear), known) == ()

    assert _dependence(PLAIN) == _dependence(harmless) == ""


@pytest.mark.slow
def test_nothing_stays_changed() -> None:
    with torch.device("meta"):
        module, given_x = Small(PLAIN).eval(), torch.empty(TOKENS, HIDDEN)
    before = [(name, id(p), p.dtype, p.requires_grad, p.grad) for name, p in module.named_parameters()]
    flags = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")

    def everything(module: nn.Module, weight: Tensor, x: Tensor) -> bool:
        names = weight.requires_grad, weight.grad, weight.dtype, weight.device, x.is_contiguous(), type(module)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
        return (names, modes, torch.get_default_dtype(), module._forward_hooks) == ()

    module.asks = everything
    assert dependence(module, lambda given, _: module(given(given_x))) == ""
    assert [(name, id(p), p.dtype, p.requires_grad, p.grad) for name, p in module.named_parameters()] == before
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")) == flags
    assert type(module) is Small
    assert not module.training
    assert not module._forward_hooks


# Every way to write experts -------------------------------------------------------------------------------------------
class Expert(nn.Module):
    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.asks = asks
        self.gate, self.up = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(self.gate(x)) * self.up(x)
        return self.down(inner * 2 if self.asks(self, self.up.weight, x) else inner)


class Block(nn.Module):
    """A block over a list of experts; `score` is its router's."""

    def __init__(self, asks: Asks, of_expert: Asks, score: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.asks, self.score, self.router = asks, score, nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(of_expert) for _ in range(EXPERTS)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, HIDDEN)
        weights, chosen = self.score(self.router(flat)).topk(2, -1)
        if self.asks(self, self.router.weight, flat):
            weights = weights * 2
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


class Stacked(nn.Module):
    """An own loop over stacked tensors."""

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.asks = asks
        self.w1, self.w3 = (nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        weights = weights * 2 if self.asks(self, self.w1, x) else weights
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, slot = torch.where(chosen == number)
            rows = x[token]
            inner = functional.silu(rows @ self.w1[number].T) * (rows @ self.w3[number].T)
            out = out.index_add(0, token, inner @ self.w2[number].T * weights[token, slot, None])
        return out


@use_experts_implementation
class Decorated(nn.Module):
    """Experts in the interface of transformers."""

    def __init__(self, _config: object, of_loop: Asks, of_gate: Asks) -> None:
        super().__init__()
        self.of_loop, self.of_gate, self.act_fn = of_loop, of_gate, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        opened = self.act_fn(gate) * up
        return opened * 2 if self.of_gate(self, self.down_proj, gate_up) else opened

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for number in range(EXPERTS):
            token, slot = torch.where(top_k_index == number)
            y = self._apply_gate(functional.linear(hidden_states[token], self.gate_up_proj[number]))
            out.index_add_(0, token, functional.linear(y, self.down_proj[number]) * top_k_weights[token, slot, None])
        return out * 2 if self.of_loop(self, self.down_proj, hidden_states) else out


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    markers._library()  # as the capture of a model does


def _listed(block: Asks, expert: Asks, score: Callable[[Tensor], Tensor]) -> str:
    with torch.device("meta"):
        module, x = Block(block, expert, score).eval(), torch.empty(BATCH, SEQUENCE, HIDDEN)
    try:
        return "" if capture_loop(module, (x,), {}) else "nothing was read"
    except Exception as error:  # noqa: BLE001 - export raises anything, and capture then leaves the block
        return str(error)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _unknown(logits: Tensor) -> Tensor:
    return logits.tanh().softmax(-1)


def _stacked(asks: Asks) -> str:
    with torch.device("meta"):
        module = Stacked(asks).eval()
        given = torch.empty(TOKENS, HIDDEN), torch.empty(TOKENS, 2, dtype=torch.long), torch.empty(TOKENS, 2)
    try:
        return "" if own_experts(module, module.forward, given, {}) else "nothing was read"
    except Exception as error:  # noqa: BLE001 - export raises anything, and capture then leaves the module
        return str(error)


def _decorated(of_loop: Asks, of_gate: Asks) -> str:
    with torch.device("meta"):
        module = Decorated(None, of_loop, of_gate).eval()
    form = form_of(module)
    return form if form.startswith("unsupported") else gate_dependence(module) or more_than_interface(module)


WAYS: dict[str, Callable[[Asks], str]] = {
    "a block over a list": lambda asks: _listed(asks, PLAIN, _softmax),
    "a member of a list": lambda asks: _listed(PLAIN, asks, _softmax),
    "an opaque block over a list": lambda asks: _listed(asks, PLAIN, _unknown),
    "an own loop": _stacked,
    "the loop of decorated experts": lambda asks: _decorated(asks, PLAIN),
    "the gate of decorated experts": lambda asks: _decorated(PLAIN, asks),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_experts_that_ask_nothing_are_read(way: str) -> None:
    assert WAYS[way](PLAIN) == ""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_experts_that_ask_are_left_however_they_are_written(way: str, question: str) -> None:
    assert WAYS[way](QUESTIONS[question][0]) != ""


@pytest.mark.parametrize("way", ["a member of a list", "an own loop", "the gate of decorated experts"])
def test_experts_that_ask_for_frozen_weights_are_left(way: str) -> None:
    assert WAYS[way](QUESTIONS["a frozen weight"][0]) != ""


@use_experts_implementation
class ReadsData(nn.Module):
    """Experts in the interface of transformers, with a loop that does not run without data."""

    def __init__(self, _config: object, asks: Asks) -> None:
        super().__init__()
        self.asks, self.act_fn = asks, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        scale = 2 if self.asks(self, self.down_proj, hidden_states) else 1
        return hidden_states.to(self.down_proj.dtype) * scale * float(top_k_weights.sum())


@pytest.mark.parametrize(
    ("question", "reason"),
    [("a frozen weight", FROZEN), ("gradients are off", "without grad"), ("a missing text", OUTSIDE), ("", "")],
)
def test_a_loop_that_does_not_run_without_data_is_told_by_its_question(question: str, reason: str) -> None:
    with torch.device("meta"):
        module = ReadsData(None, QUESTIONS[question][0] if question else PLAIN).eval()
    found = more_than_interface(module)
    assert reason in found
    assert bool(reason) == bool(found)


def test_packages_beside_torch_are_code_of_models() -> None:
    packages = Path(torch.__file__).parents[1]
    assert is_of_a_model(str(packages / "torchtitan" / "experts.py"))
    assert not is_of_a_model(str(packages / "torch" / "nn" / "functional.py"))


@pytest.mark.parametrize(
    "profiler", [lambda frame, kind, called: None, cProfile.Profile()], ids=["function", "cProfile"]
)
def test_a_profiler_of_the_user_goes_on_after_the_capture(profiler: Any) -> None:
    """Before Python 3.12 cProfile is what `sys.getprofile` returns, and not a function."""
    outer = sys.getprofile()
    sys.setprofile(profiler) if callable(profiler) else profiler.enable()
    try:
        active = sys.getprofile()
        with Mentions().collected():
            abs(1)
        assert sys.getprofile() is active
    finally:
        sys.setprofile(outer)
