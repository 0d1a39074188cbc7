"""`run`: from a request to a report. The model is compiled into a folder that is removed at the end.

A step's time is from token to token of `generate` itself, choice of the token included; the GPU has finished then,
since the choice reads its result. The first steps do not count: graphs are captured in them. Where the context outgrows
its graph later (at 256, 512, 1,024 tokens and so on), the step with the new capture counts; the median leaves it out.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ktc import compiler
from ktc.foundation import host
from ktc.foundation.files import temporary_folder
from ktc.model.decode_steps import cuda_graph
from ktc.model.experts.cpu_backend import CpuKernel
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.load import load
from ktc.tools.bench.finetune.device import peaks, reset_peaks
from ktc.tools.bench.generate.report import LeftOut, Report, Row
from ktc.tools.bench.generate.request import Impl, Request
from ktc.tools.bench.limits import Limits, Samples, build_library
from ktc.tools.bench.machine import machine
from ktc.tools.bench.stack import Stack, stack_of
from ktc.tools.bench.stock import reason_against, stock_model
from ktc.tools.bench.watch import Watch

_FIRST_TOKEN: Final = 3  # of a vocabulary: those before it may end a text
_UNCOUNTED: Final = 3  # steps after a prompt: memory, libraries and graphs


def run(request: Request, watch: Watch) -> Report:
    """Measure. The peer has the GPU for itself: ktc's model is freed before.

    Raises InputRefused (U030) and what compiling and loading raise.
    """
    seconds, found = dict[str, float](), list[Row | LeftOut]()
    with temporary_folder("generate") as folder:
        stack = stack_of(request.model, request.layers, folder / "config")
        limits = Limits(build_library(host.detect().isas[0], folder), host.usable_threads())
        own: list[Impl] = [impl for impl in request.impls if impl != "hf"]
        if own:
            model = _compiled(request, stack, folder / "generated_by_bench", watch, seconds)
            for impl in own:
                if impl == "eager" and getattr(model, "decode_graphs", None) is None:
                    found.append(LeftOut(impl, "the compiled model has no graphs: `ktc` is eager too"))
                    continue
                found += _rows(impl, model, request, limits, watch)
            del model
            gc.collect()
            torch.cuda.empty_cache()
        if "hf" in request.impls:
            if reason := reason_against(stack):
                found.append(LeftOut("hf", reason))
            else:
                found += _peer_rows(stack, request, limits, watch)
    return Report(
        machine=machine(),
        request=asdict(request),
        layers=stack.layers,
        depth=stack.depth,
        seconds=seconds,
        rows=tuple(each for each in found if isinstance(each, Row)),
        left_out=tuple(each for each in found if isinstance(each, LeftOut)),
    )


def _compiled(request: Request, stack: Stack, out: Path, watch: Watch, seconds: dict[str, float]) -> PreTrainedModel:
    began = time.perf_counter()
    settings = request.settings
    compiler.compile(stack.model, request.rule, out, settings=settings, random_weights=True, observe=watch.stage)
    seconds["compile"] = time.perf_counter() - began
    began = time.perf_counter()
    model = load(out, random_weights=request.seed, progress=watch.part("weights"))
    seconds["load"] = time.perf_counter() - began
    return model


def _peer_rows(stack: Stack, request: Request, limits: Limits, watch: Watch) -> list[Row | LeftOut]:
    try:
        peer = stock_model(stack, "cuda:0", request.seed, watch.part("weights of the peer"))
    except torch.OutOfMemoryError:
        return [LeftOut("hf", "the GPU has no memory for its weights")]
    return list(_rows("hf", peer, request, limits, watch))


def _rows(
    impl: Impl, model: PreTrainedModel, request: Request, limits: Limits, watch: Watch
) -> Iterator[Row | LeftOut]:  # fmt: skip
    for batch in request.batches:
        for context in request.contexts:
            what = f"batch {batch}, context {context}"
            try:
                row = _row(impl, model, batch, context, request, limits, watch)
            except torch.OutOfMemoryError:
                watch.told(f"{impl}, {what}: out of GPU memory")
                yield LeftOut(impl, f"{what}: out of GPU memory")
                continue
            watch.told(f"{impl}, {what}: {row.ms:.1f} ms, {row.tokens_per_second:.1f} token/s")
            yield row


def _row(
    impl: Impl, model: Any, batch: int, context: int, request: Request, limits: Limits, watch: Watch
) -> Row:  # fmt: skip
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(request.seed)
    ids = torch.randint(_FIRST_TOKEN, model.config.vocab_size, (batch, context), generator=generator).to(device)
    samples, clock, told = Samples(), _Clock(), _Told()
    watch.progress(f"{impl}, batch {batch}, context {context}", 0, 1)  # not in each step, whose time it would take
    limits.measure(samples)
    if (graphs := getattr(model, "decode_graphs", None)) is not None:
        graphs.clear()  # each row has its own memory, and its own warnings
    reset_peaks()
    logging.getLogger(cuda_graph.__name__).addHandler(told)
    try:
        clock.start()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.steps,
            min_new_tokens=request.steps,
            do_sample=False,
            pad_token_id=0,
            disable_compile=impl != "ktc",
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    finally:
        logging.getLogger(cuda_graph.__name__).removeHandler(told)
    limits.measure(samples)
    steps, read = clock.steps[_UNCOUNTED:], samples.median()[1]
    median = statistics.median(steps)
    on_cpu = 0.0 if impl == "hf" else experts_bytes(model, batch)
    return Row(
        impl=impl,
        batch=batch,
        context=context,
        steps=len(steps),
        ms=1e3 * median,
        best_ms=1e3 * min(steps),
        tokens_per_second=batch / median,
        prompt_seconds=clock.steps[0],
        read_gbps=read,
        experts_ms=1e-6 * on_cpu / read if on_cpu else None,
        gpu_allocated=peaks()[0],
        told=told.text,
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


class _Clock(StoppingCriteria):
    """The seconds from token to token; the first is that of the prompt."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def start(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        now = time.perf_counter()
        self.steps.append(now - self._last)
        self._last = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _Told(logging.Handler):
    """The first warning about steps that were not captured."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage().partition("\n")[0]
