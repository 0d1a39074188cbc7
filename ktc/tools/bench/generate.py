"""`ktc bench generate`: the steps of `generate` at a model's real sizes, with random weights.

A step's time is from token to token of `generate` itself, as a streamer gets them on the host, choice of the token
included. ktc's next step may be under way then. The first steps do not count: graphs are captured in them. Where the
context outgrows its graph later (at 256, 512, 1,024 tokens and so on), the step with the new capture counts; the median
leaves it out.
The model is compiled into a folder that is removed at the end.
"""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer

from ktc import compiler
from ktc.foundation import host
from ktc.foundation.files import temporary_folder
from ktc.model.decode_steps import cuda_graph
from ktc.model.experts.backends.cpu_backend import CpuKernel
from ktc.model.experts.kept.kept_experts import ENGINES, KeptExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.kept import kept_stores
from ktc.model.loading.load import load
from ktc.tools.bench.floor import (
    COUNTED,
    Floor,
    Kernels,
    Read,
    cache_bytes,
    floor_of,
    rates_of,
    reason_against,
    weights_read,
)
from ktc.tools.bench.machine import peaks, reset_peaks
from ktc.tools.bench.peers import peer
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import LeftOut, column, table_of
from ktc.tools.bench.requests import Generate
from ktc.tools.bench.rounds import StepClock
from ktc.tools.bench.stack import Stack, StackReport, facts_of, stack_of, timed
from ktc.tools.measure.limits import Limits, Samples, build_library

if TYPE_CHECKING:
    from rich.table import Table

_FIRST_TOKEN: Final = 3  # of a vocabulary: those before it may end a text
_UNCOUNTED: Final = 3  # steps after a prompt: memory, libraries and graphs
_NAMES: Final = {"ktc": "ktc", "eager": "ktc, eager", "hf": "stock HF on the GPU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The steps of one `generate`: `ms` is the median from token to token, for all sequences of the batch.

    `tokens_per_second` are those of all sequences. `experts_ms` is the time in which the CPU reads the experts of a
    step at `read_gbps`, the bandwidth before and after the row; None where no expert is on the CPU. Where steps
    split experts, it is that of the CPU's part, `kept` experts have a place on the GPU, `read_by` has the shares of
    their bytes by engine, and `bus_share` is the bus's share of the others' at the end. `told` says why steps were
    not graphs. Memory in bytes.
    """

    impl: str = column("", lambda row: _NAMES[row.impl], left=True)
    batch: int = column("batch")
    context: int = column("context")
    steps: int
    tokens_per_second: float = column("token/s", "{:.1f}")
    ms: float = column("step ms", "{:.1f}")
    best_ms: float = column("best", "{:.1f}")
    experts_ms: float | None = column(
        "experts' limit", lambda row: f"{row.experts_ms:.1f} ({row.experts_ms / row.ms:.2f})"
    )
    read_gbps: float = column("read GB/s", "{:.0f}")
    kept: int | None = column("kept", lambda row: "-" if row.kept is None else f"{row.kept:,}", default=None)
    read_by: Mapping[str, float] | None = column("by GPU, bus, CPU", lambda row: shares_text(row.read_by), default=None)
    bus_share: float | None = None
    gpu_allocated: int = column("GPU GB", lambda row: f"{row.gpu_allocated / 1e9:.2f}")
    floor: Floor | None = column("floor", lambda row: f"{row.floor.ms:.1f} ({row.floor.ms / row.ms:.2f})", default=None)
    prompt_seconds: float
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport(StackReport):
    """A row per way to compute, batch and context, and the ways that were left out."""

    def shown(self) -> Iterator[str | Table]:
        """Yield the rows, the warnings about them, and the reason for each missing measurement."""
        yield self.headline(f"{self.request['steps']} new tokens")
        if self.rows:
            yield table_of(self.rows)
        yield from (floor_text(row) for row in self.rows if row.floor is not None)
        yield from (f"{_NAMES[row.impl]}, context {row.context}: {row.told}" for row in self.rows if row.told)
        yield from (f"not measured: {_NAMES[entry.impl]}: {entry.reason}" for entry in self.left_out)


def run(request: Generate, sink: ProgressSink) -> GenerateReport:
    """Measure. The peer has the GPU for itself: ktc's model is freed before.

    Raises InputRefused (U030, U014) and what compiling and loading raise.
    """
    seconds, results = dict[str, float](), list[Row | LeftOut]()
    stock = peer("stock") if "hf" in request.impls else None
    with temporary_folder("generate") as folder:
        stack = stack_of(request.model, request.layers, folder / "config")
        limits = Limits(build_library(host.detect().isas[0], folder), host.usable_threads())
        if request.impls != ("hf",) and request.impls:
            out, settings = folder / "generated_by_bench", request.settings
            with timed(seconds, "compile"):
                compiler.compile(
                    stack.model, request.rule, out, settings=settings, random_weights=True, observe=sink.stage
                )
            with timed(seconds, "load"):
                model: Any = load(out, random_weights=request.seed, progress=sink.part("weights"))
            for impl in (impl for impl in request.impls if impl != "hf"):
                if impl == "eager" and getattr(model, "decode_graphs", None) is None:
                    results.append(LeftOut(impl, "the compiled model has no graphs: `ktc` is eager too"))
                else:
                    results += rows(impl, model, request, limits, sink)
            del model
            gc.collect()
            torch.cuda.empty_cache()
        if stock is not None:
            reason = stock.reason_against(stack)
            results += [LeftOut("hf", reason)] if reason else peer_rows(stock, stack, request, limits, sink)
    return GenerateReport.of(results, **facts_of(request, stack), seconds=seconds)


def peer_rows(
    stock: Any, stack: Stack, request: Generate, limits: Limits, sink: ProgressSink
) -> Iterator[Row | LeftOut]:
    """Yield the rows of the stock model, if the GPU has room for it."""
    try:
        model = stock.stock_model(stack, "cuda:0", request.seed, sink.part("weights of the peer"))
    except torch.OutOfMemoryError:
        yield LeftOut("hf", "the GPU has no memory for its weights")
        return
    yield from rows("hf", model, request, limits, sink)


def rows(impl: str, model: Any, request: Generate, limits: Limits, sink: ProgressSink) -> Iterator[Row | LeftOut]:
    """Yield a row for each batch and context."""
    for batch in request.batches:
        for context in request.contexts:
            what = f"{impl}, batch {batch}, context {context}"
            sink.progress(what, 0, 1)  # not in each step, whose time it would take
            generator = torch.Generator().manual_seed(request.seed)
            ids = torch.randint(_FIRST_TOKEN, model.config.vocab_size, (batch, context), generator=generator)
            try:
                row = _row(impl, model, ids, request.steps, limits)
            except torch.OutOfMemoryError:
                sink.finished(f"{what}: out of GPU memory")
                yield LeftOut(impl, f"batch {batch}, context {context}: out of GPU memory")
                continue
            sink.finished(f"{what}: {row.ms:.1f} ms, {row.tokens_per_second:.1f} token/s")
            yield row


def _row(impl: str, model: Any, ids: torch.Tensor, new_tokens: int, limits: Limits) -> Row:
    ids = ids.to(model.get_input_embeddings().weight.device)
    batch, context = ids.shape
    samples, clock, warnings = Samples(), StepClock(), _FirstWarning()
    limits.measure(samples)
    if (graphs := getattr(model, "decode_graphs", None)) is not None:
        graphs.clear()  # each row has its own memory, and its own warnings
    stores = () if impl == "hf" else kept_stores(model)
    more = COUNTED + 1 if impl == "ktc" and graphs is not None and ids.is_cuda else 0  # behind those that are timed
    kernels = Kernels(new_tokens) if more else None
    tokens = Tokens(clock, kernels, stores, new_tokens)
    reset_peaks()
    logging.getLogger(cuda_graph.__name__).addHandler(warnings)
    try:
        clock.start()
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens + more,
            min_new_tokens=new_tokens + more,
            do_sample=False,
            pad_token_id=0,
            disable_compile=impl != "ktc",
            return_dict_in_generate=True,
            streamer=tokens,
        )
    finally:
        logging.getLogger(cuda_graph.__name__).removeHandler(warnings)
        if kernels is not None:
            kernels.close()
    allocated, cached = peaks()[0], cache_bytes(answer.past_key_values)
    del answer
    limits.measure(samples)
    steps, read = clock.seconds[_UNCOUNTED:new_tokens], samples.median()[1]
    median, of_step = statistics.median(steps), tokens.read_of_step()
    shares = shares_of(of_step)
    on_cpu = 0.0 if impl == "hf" else experts_bytes(model, batch) * (shares["cpu"] if shares else 1.0)
    floor, told = None, ""
    if kernels is not None:
        cpu, on_gpu = of_step["cpu"] if shares else on_cpu, cached + of_step["gpu"]
        counted = Read(gpu=on_gpu, bus=of_step["bus"], cpu=cpu, kernels=kernels.of_step, host_nodes=0)
        floor, told = _floor(model, batch, counted, limits, 1e9 * read)
    return Row(
        impl=impl,
        batch=batch,
        context=context,
        steps=len(steps),
        ms=1e3 * median,
        best_ms=1e3 * min(steps),
        tokens_per_second=batch / median,
        prompt_seconds=clock.seconds[0],
        floor=floor,
        read_gbps=read,
        experts_ms=1e-6 * on_cpu / read if on_cpu else None,
        kept=sum(store.num_places for store in stores) if stores else None,
        read_by=shares,
        bus_share=next((store.bus_share for store in stores if shares), None),
        gpu_allocated=allocated,
        told=warnings.text or (f"no floor: {told}" if told else ""),
    )


def _floor(model: Any, tokens: int, counted: Read, limits: Limits, cpu_alone: float) -> tuple[Floor | None, str]:
    """Return the floor of a step that read `counted` beside its weights, or why there is none."""
    if reason := reason_against(model, tokens):
        return None, reason
    weights, nodes = weights_read(model, tokens)
    device = model.get_input_embeddings().weight.device
    try:
        rates = rates_of(device, limits, cpu_alone)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return None, str(error).partition("\n")[0]
    return floor_of(replace(counted, gpu=counted.gpu + weights, host_nodes=nodes), rates), ""


def bytes_by(stores: Sequence[KeptExperts]) -> Mapping[str, int]:
    """Return the bytes of experts that each engine has read in steps that split them."""
    figures = [store.figures().nbytes for store in stores]
    return {engine: sum(of_store[engine] for of_store in figures) for engine in ENGINES}


def shares_of(read: Mapping[str, float]) -> Mapping[str, float] | None:
    """Return the share of each engine in the bytes of a step, None if nothing was read."""
    total = sum(read.values())
    return {engine: nbytes / total for engine, nbytes in read.items()} if total else None


def shares_text(shares: Mapping[str, float] | None) -> str:
    """Return the shares of the engines for a table."""
    return "-" if shares is None else ", ".join(f"{shares[engine]:.2f}" for engine in ENGINES)


def floor_text(row: Row) -> str:
    """Return what the floor of a row was computed from."""
    floor = row.floor
    assert floor is not None, "a row on a GPU"
    read, rates = floor.read, floor.rates
    functions = f" and {read.host_nodes} host functions of {1e6 * rates.host_node:.0f} us" if rates.host_node else ""
    return (
        f"floor at context {row.context}: {floor.ms:.2f} ms, {floor.ms / row.ms:.2f} of the step: "
        f"GPU {read.gpu / 1e9:.2f} GB at {rates.gpu / 1e9:.0f} GB/s {floor.gpu_ms:.2f} ms; bus {read.bus / 1e9:.2f} GB "
        f"and CPU {read.cpu / 1e9:.2f} GB {floor.experts_ms:.2f} ms (at once {rates.bus / 1e9:.0f} and "
        f"{rates.cpu / 1e9:.0f} GB/s, CPU alone {rates.cpu_alone / 1e9:.0f}); {read.kernels:.0f} kernels of "
        f"{1e6 * rates.kernel:.2f} us{functions} {floor.launches_ms:.2f} ms"
    )


def experts_bytes(model: nn.Module, tokens: int) -> float:
    """Return the bytes of experts that a step of this many tokens reads on the CPU, if choices are even.

    Layers whose experts stay on a GPU are not read there.
    """
    total = 0.0
    for module in model.modules():
        if isinstance(module, FusedMoe) and isinstance(module.backend(tokens, plain=True), CpuKernel):
            chosen = 1 - (1 - module.top_k / module.num_experts) ** tokens
            total += module.packed_bytes * chosen
    return total


class Tokens(BaseStreamer):
    """Ends a step of the clock at each token that the host gets; the first step is that of the prompt."""

    def __init__(
        self, clock: StepClock, kernels: Kernels | None = None, stores: Sequence[KeptExperts] = (), last: int = 0
    ) -> None:
        """Count what `stores` read from the first step that counts to the `last` token, if there are any."""
        self._clock, self._kernels, self._stores = clock, kernels, stores
        self._last, self._counts, self._has_prompt = last, list[Mapping[str, int]](), False

    def read_of_step(self) -> Mapping[str, float]:
        """Return the bytes of experts that each engine read in a step, without the captures of the first steps."""
        before, after = self._counts
        return {engine: (after[engine] - before[engine]) / (self._last - _UNCOUNTED) for engine in ENGINES}

    def put(self, value: Any) -> None:
        """Receive the prompts (B, L), then tokens (B,)."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._clock.passed()
        if len(self._clock.seconds) in (_UNCOUNTED, self._last):
            self._counts.append(bytes_by(self._stores))
        if self._kernels is not None:
            self._kernels.token()

    def end(self) -> None:
        """Do nothing."""


class _FirstWarning(logging.Handler):
    """The first warning about steps that were not captured."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage().partition("\n")[0]
