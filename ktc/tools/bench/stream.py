"""`ktc bench stream`: one layer's experts streamed to a GPU, beside a plain copy of as many bytes in the same run.

In: a shape, a weight format and numbers of tokens. Out: milliseconds of forward and backward, and how many times as
long as the bus they take. Refused: a machine without a GPU (H244), experts that do not fit (H240), invalid options.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import psutil
import torch

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import host
from ktc.model.experts.backend import Offload
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.random_experts import RandomExperts
from ktc.model.kernels.packed_size import packed_bytes
from ktc.stages.codegen import build, render
from ktc.stages.plan.placement import gib
from ktc.tools.bench import ours
from ktc.tools.bench.inputs import Batch, batches
from ktc.tools.bench.request import Request

Progress = Callable[[int, int, str], None]
Mark: TypeAlias = "float | torch.cuda.Event"
Graph = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]
_ROUNDS: Final = 5
_INPUTS: Final = 2  # batches on the device
_WARM_UP: Final = 3  # rounds: the stream foresees a pass from its third time on
_CHUNK: Final = 128 << 20  # bytes of one copy
_BASE: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One number of tokens. Medians; `of_bus` is the slower pass, as a multiple of the bus's time for its bytes."""

    tokens: int
    forward_ms: float
    backward_ms: float
    forward_gbps: float
    backward_gbps: float
    of_bus: float


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `layer_bytes` cross the bus once per pass. `bus_gbps` is of pinned copies in between."""

    device: str
    shape: str
    weight_format: str
    layer_bytes: int
    bus_gbps: float
    bus_ms: float
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `ktc bench stream --json` prints."""
        return asdict(self)


def require(request: Request, gpus: int) -> None:
    """Raise HostLacks without a GPU (H244), or without host memory for the layer (H240)."""
    if gpus == 0:
        message = "experts cannot be streamed to a GPU: this process sees none"
        raise HostLacks(Diagnostic("H244", message, hint="`ktc bench moe` measures experts on the CPU"))
    ((_, spec),) = ours.asked(request)
    needed, free = packed_bytes(spec) + _BASE, psutil.virtual_memory().available
    if needed > free:
        message = f"these experts need {gib(needed)} of memory, and {gib(free)} are free"
        raise HostLacks(Diagnostic("H240", message, hint="`--experts N` measures fewer"))


def run(request: Request, progress: Progress, device: torch.device) -> Report:
    """Measure each number of tokens, and the bus after it."""
    progress(0, 0, "building the kernel")
    module = _module(request, device)
    progress(0, 0, "making weights")
    RandomExperts(0).fill(module, 0, lambda size: None)
    bus = Bus(module.packed_bytes, device)
    copies: list[float] = []
    rounds, measured = request.rounds or _ROUNDS, dict[int, list[tuple[float, float]]]()
    for place, tokens in enumerate(request.tokens):
        progress(place, len(request.tokens), f"{tokens:,} tokens")
        inputs = [_moved(batch, device) for batch in batches(request.shape, tokens)[:_INPUTS]]
        measured[tokens] = _passes(module, inputs, device, rounds)
        copies += [bus.copy() for _ in range(rounds)]
    return _report(request, module.packed_bytes, device, statistics.median(copies), measured)


def _module(request: Request, device: torch.device) -> FusedMoe:
    ((_, spec),) = ours.asked(request)
    library = build.build(render.render([spec], {spec: "ktc bench stream"}), host.detect())
    shape = request.shape
    sizes = (shape.num_experts, shape.hidden, shape.intermediate, shape.top_k)
    return FusedMoe(*sizes, kernel=library.kernel(spec.entry), numa="none", offload=Offload((device,), 1))


class Bus:
    """Copies of pinned memory to a device, as many bytes as a layer has, chunk by chunk."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        pinned = device.type == "cuda"
        self._sources = [torch.empty(min(_CHUNK, size), dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._targets = [torch.empty_like(each, device=device) for each in self._sources]
        for source in self._sources:
            source.fill_(1)  # else all of its pages are one page of zeros

    def copy(self) -> float:
        """Return the seconds of one layer's bytes."""
        starts = range(0, self._size, _CHUNK)
        return seconds(self._device, lambda: [self._chunk(number, start) for number, start in enumerate(starts)])

    def _chunk(self, number: int, start: int) -> None:
        size = min(_CHUNK, self._size - start)
        self._targets[number % 2][:size].copy_(self._sources[number % 2][:size], non_blocking=True)


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of a call, until the device has done its work."""
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _passes(module: FusedMoe, inputs: Sequence[Batch], device: torch.device, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of forward and of backward, which computes the gradients of both inputs.

    Forward passes follow each other without a wait, as those of layers do, and then backward passes of one graph: the
    experts of a pass may be on their way before it, and those of the next one are before its end. So a median is a
    pass's share of the bus or of the GPU, whichever takes longer. The first rounds lock pages, compile and allocate.
    """

    def forward(number: int) -> Graph:
        batch = inputs[number % len(inputs)]
        x, weights = batch.x_TH.detach().requires_grad_(), batch.weights_TK.detach().requires_grad_()
        return module(x, batch.index_TK, weights), (x, weights), batch.grad_TH

    graph = forward(0)

    def backward(number: int) -> None:
        out, inputs_of, grad = graph
        torch.autograd.grad(out, inputs_of, grad, retain_graph=True)

    return list(zip(_rounds(forward, device, rounds), _rounds(backward, device, rounds), strict=True))


def _rounds(call: Callable[[int], object], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of calls that follow each other, after those that warm up."""
    marks: list[Mark] = []
    for number in range(rounds + _WARM_UP):
        if number >= _WARM_UP:
            marks.append(_mark(device))
        call(number)
    marks.append(_mark(device))
    _wait(device)
    return [_elapsed(one, other) for one, other in pairwise(marks)]


def _mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _elapsed(one: Mark, other: Mark) -> float:
    if isinstance(one, torch.cuda.Event):
        assert isinstance(other, torch.cuda.Event), "marks of one device"
        return one.elapsed_time(other) / 1e3
    assert not isinstance(other, torch.cuda.Event), "marks of one device"
    return other - one


def _moved(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device) for tensor in (batch.x_TH, batch.index_TK, batch.weights_TK, batch.grad_TH)))


def _report(
    request: Request, size: int, device: torch.device, copied: float, measured: dict[int, list[tuple[float, float]]]
) -> Report:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    rows = tuple(_row(tokens, times, size, copied) for tokens, times in measured.items())
    stored = request.impls[0].removeprefix(ours.PREFIX)
    return Report(name, str(request.shape), stored, size, size / copied / 1e9, copied * 1e3, rows)


def _row(tokens: int, times: Sequence[tuple[float, float]], size: int, copied: float) -> Row:
    forward, backward = (statistics.median(each) for each in zip(*times, strict=True))
    slower = max(forward, backward) / copied
    return Row(tokens, forward * 1e3, backward * 1e3, size / forward / 1e9, size / backward / 1e9, slower)
