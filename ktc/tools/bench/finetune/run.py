"""`run`: from a request to a report. The model is compiled into a folder that is removed at the end."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from peft import LoraConfig

from ktc.foundation.files import temporary_folder
from ktc.tools.bench.finetune import hf, ours
from ktc.tools.bench.finetune.device import reset_peaks
from ktc.tools.bench.finetune.report import LeftOut, Report, Row, marked, whole_depth
from ktc.tools.bench.finetune.request import Request
from ktc.tools.bench.machine import machine
from ktc.tools.bench.stack import Stack, stack_of
from ktc.tools.bench.stock import reason_against
from ktc.tools.bench.watch import Watch

T = TypeVar("T")


def run(request: Request, watch: Watch) -> Report:
    """Measure. The peer has the GPU for itself: ktc's model is freed before.

    Raises InputRefused (U030) and HostLacks (H240), and what compiling, loading and training raise.
    """
    with temporary_folder("finetune") as folder:
        seconds = dict[str, float]()
        stack = stack_of(request.model, request.layers, folder / "config")
        out = _timed(seconds, "compile", lambda: ours.compiled(request, stack, folder / "tuned_by_bench", watch))
        found: list[Row | LeftOut] = []
        lora, notes = ours.lora_of(request, out)
        if "ktc" in request.impls:
            found += _ours(request, lora, out, watch, seconds)
        if "hf" in request.impls:
            gc.collect()
            reset_peaks()
            found += _peer(request, stack, lora, watch)
    rows = marked([each for each in found if isinstance(each, Row)])
    if not stack.is_whole:
        rows = tuple(
            row if row.experts == "reference" else whole_depth(row, stack.depth, stack.times_whole) for row in rows
        )
    return Report(
        machine=machine("peft"),
        request=asdict(request),
        layers=stack.layers,
        depth=stack.depth,
        tokens_per_step=request.tokens,
        seconds=seconds,
        rows=rows,
        left_out=tuple(each for each in found if isinstance(each, LeftOut)),
        notes=notes,
    )


def _ours(request: Request, lora: LoraConfig, out: Path, watch: Watch, seconds: dict[str, float]) -> list[Row]:
    base = _timed(seconds, "load", lambda: ours.loaded(request, out, watch))
    watch.told(f"weights: {seconds['load']:.1f} s")
    return list(ours.rows(base, lora, request, out, watch))


def _peer(request: Request, stack: Stack, lora: LoraConfig, watch: Watch) -> list[Row | LeftOut]:
    if reason := reason_against(stack):
        return [LeftOut("hf", "", reason)]
    return list(hf.measured(request, stack, lora, watch))


def _timed(seconds: dict[str, float], name: str, call: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = call()
    seconds[name] = time.perf_counter() - began
    return result
