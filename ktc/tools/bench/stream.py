"""`ktc bench stream`: one layer's experts streamed to a GPU, beside a plain copy of as many bytes in the same run.

In: a shape, a weight format and numbers of tokens. Out: milliseconds of forward and backward, and how many times as
long as the bus they take. Refused: a machine without a GPU (H244), experts that do not fit (H240).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

import psutil
import torch

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import host
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.random_experts import RandomExperts
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.form import ExpertsSizes, parse_form
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.packed_size import packed_bytes
from ktc.stages.codegen import build, render
from ktc.stages.plan.placement import gib
from ktc.tools.bench import ours
from ktc.tools.bench.inputs import Batch, batches
from ktc.tools.bench.layer_requests import Stream
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import Report, column, table_of
from ktc.tools.measure.bus import Bus
from ktc.tools.measure.figures import wait

if TYPE_CHECKING:
    from rich.table import Table

Mark: TypeAlias = "float | torch.cuda.Event"
Graph = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]
_ROUNDS: Final = 5
_INPUTS: Final = 2  # batches on the device
_WARM_UP: Final = 3  # rounds: the stream foresees a pass from its third time on
_BASE: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One number of tokens. Medians; `of_bus` is the slower pass, as a multiple of the bus's time for its bytes."""

    tokens: int = column("tokens", "{:,}")
    forward_ms: float = column("forward ms", "{:.1f}")
    forward_gbps: float = column("GB/s", "{:.1f}")
    backward_ms: float = column("backward ms", "{:.1f}")
    backward_gbps: float = column("GB/s", "{:.1f}")
    of_bus: float = column("of the bus's time", "{:.2f}x")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport(Report):
    """`layer_bytes` cross the bus once per pass. `bus_gbps` is of pinned copies in between."""

    device: str
    shape: str
    weight_format: str
    layer_bytes: int
    bus_gbps: float
    bus_ms: float
    rows: tuple[Row, ...]

    def shown(self) -> Iterator[str | Table]:
        """Yield the bus and the rows."""
        bus = f"{self.layer_bytes / 1e9:.2f} GB take {self.bus_ms:.1f} ms on the bus ({self.bus_gbps:.1f} GB/s)"
        yield f"{self.shape}, {self.weight_format}, on {self.device}: {bus}"
        yield table_of(self.rows)


def require(spec: FusedMoeSpec, gpus: int) -> None:
    """Raise HostLacks without a GPU (H244), or without host memory for the layer (H240)."""
    if gpus == 0:
        message = "experts cannot be streamed to a GPU: this process sees none"
        raise HostLacks(Diagnostic("H244", message, hint="`ktc bench moe` measures experts on the CPU"))
    needed, free = packed_bytes(spec) + _BASE, psutil.virtual_memory().available
    if needed > free:
        message = f"these experts need {gib(needed)} of memory, and {gib(free)} are free"
        raise HostLacks(Diagnostic("H240", message, hint="`--experts N` measures fewer"))


def run(request: Stream, sink: ProgressSink) -> StreamReport:
    """Measure on the first GPU."""
    spec = ours.spec_of(request.shape, host.detect().isas[0], request.weight_format)
    require(spec, torch.cuda.device_count())
    return run_on(torch.device("cuda:0"), request, spec, sink)


def run_on(device: torch.device, request: Stream, spec: FusedMoeSpec, sink: ProgressSink) -> StreamReport:
    """Measure each number of tokens, and the bus after it."""
    sink.progress("building the kernel", 0, 0)
    shape = request.shape
    library = build.build(render.render([spec], {spec: "ktc bench stream"}), host.detect())
    sizes = ExpertsSizes(shape.num_experts, shape.hidden, shape.intermediate, shape.top_k)
    packed = PackedExperts(library.kernel(spec.entry), 1, sizes, "none")
    weights = ExpertsWeights(parse_form("silu"), sizes, torch.bfloat16, packed)
    module = FusedMoe(weights, offload=Offload((device,), 1))
    sink.progress("making weights", 0, 0)
    RandomExperts(0).fill(module, 0, lambda size: None)
    size, bus = module.packed_bytes, Bus(module.packed_bytes, device)
    copies, passes = list[float](), list[tuple[float, float]]()
    rounds = request.rounds or _ROUNDS
    for place, tokens in enumerate(request.tokens):
        sink.progress(f"{tokens:,} tokens", place, len(request.tokens))
        inputs = [batch.to(device) for batch in batches(shape, tokens)[:_INPUTS]]
        forward, backward = _passes(module, inputs, device, rounds)
        passes.append((statistics.median(forward), statistics.median(backward)))
        copies += [bus.copy() for _ in range(rounds)]
    copied = statistics.median(copies)
    return StreamReport(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        shape=str(shape),
        weight_format=request.weight_format,
        layer_bytes=size,
        bus_gbps=size / copied / 1e9,
        bus_ms=copied * 1e3,
        rows=tuple(
            Row(tokens, 1e3 * there, size / there / 1e9, 1e3 * back, size / back / 1e9, max(there, back) / copied)
            for tokens, (there, back) in zip(request.tokens, passes, strict=True)
        ),
    )


def _passes(
    module: FusedMoe, inputs: Sequence[Batch], device: torch.device, rounds: int
) -> tuple[list[float], list[float]]:
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

    return _rounds(forward, device, rounds), _rounds(backward, device, rounds)


def _rounds(call: Callable[[int], object], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of calls that follow each other, after those that warm up."""
    marks: list[Mark] = []
    for number in range(rounds + _WARM_UP):
        if number >= _WARM_UP:
            marks.append(_mark(device))
        call(number)
    marks.append(_mark(device))
    wait(device)
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
