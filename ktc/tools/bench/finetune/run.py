"""From a request to a report: the model is compiled into a folder that is removed at the end, and loaded once.

Out: a row for each place of ktc's experts, from the same adapter, and one for each split of the peer. Refused: a model
that does not fit (H240), experts on a GPU to which the program streams none (U030), a missing peer (U014), and what
compiling, loading and training refuse.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc import compiler
from ktc.foundation.files import temporary_folder
from ktc.model.experts.module import FusedMoe
from ktc.model.loading import peft_glue
from ktc.model.loading.load import load
from ktc.stages.plan import BatchShape
from ktc.tools.bench.finetune.memory import require_room
from ktc.tools.bench.finetune.reference import reference_of
from ktc.tools.bench.finetune.report import FinetuneReport, Row, marked, not_measured, whole_depth
from ktc.tools.bench.finetune.steps import measured
from ktc.tools.bench.machine import reset_peaks
from ktc.tools.bench.peers import peer
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import LeftOut
from ktc.tools.bench.requests import STREAMED_TO, Finetune
from ktc.tools.bench.stack import Stack, facts_of, stack_of, timed


def run(request: Finetune, sink: ProgressSink) -> FinetuneReport:
    """Measure. The peer has the GPU for itself: ktc's model is freed before."""
    seconds, results = dict[str, float](), list[Row | LeftOut]()
    peers = (peer("stock"), peer("finetune")) if "hf" in request.impls else None
    with temporary_folder("finetune") as folder:
        stack = stack_of(request.model, request.layers, folder / "config")
        with timed(seconds, "compile"):
            out = _compiled(request, stack, folder / "tuned_by_bench", sink)
        lora, notes = _lora_of(request, out)
        if "ktc" in request.impls:
            with timed(seconds, "load"):
                seed = request.seed if request.random_weights else None
                base = load(out, random_weights=seed, progress=sink.part("weights"))
            sink.finished(f"weights: {seconds['load']:.1f} s")
            results += _rows(base, lora, request, out, sink)
            del base
        if peers is not None:
            gc.collect()
            reset_peaks()
            stock, steps = peers
            reason = stock.reason_against(stack)
            results += [not_measured(reason)] if reason else steps.measured(request, stack, lora, sink)
    rows = marked([entry for entry in results if isinstance(entry, Row)])
    if not stack.is_whole:
        rows = tuple(
            row if row.experts == "reference" else whole_depth(row, stack.depth, stack.times_whole) for row in rows
        )
    missing = (entry for entry in results if isinstance(entry, LeftOut))
    facts = facts_of(request, stack, "peft")
    return FinetuneReport.of((*rows, *missing), **facts, seconds=seconds, tokens_per_step=request.tokens, notes=notes)


def _compiled(request: Finetune, stack: Stack, out: Path, sink: ProgressSink) -> Path:
    analysis = compiler.analyse(
        stack.model,
        request.rule,
        request.settings,
        observe=sink.stage,
        must_fit=BatchShape(1, request.length),
        reading=compiler.Reading(random_weights=request.random_weights, to_compile=True),
    )
    require_room(analysis, request)
    return compiler.complete(analysis, out, sink.stage)


def _lora_of(request: Finetune, out: Path) -> tuple[LoraConfig, tuple[str, ...]]:
    """Return the adapter of all rows, and notes about what differs from the compiled model's own."""
    lora = peft_glue.read_lora_config(out)
    if not request.compared or not lora.lora_dropout:
        return lora, ()
    note = f"dropout is 0 instead of {lora.lora_dropout:g}: its draws differ between devices, and rows are compared"
    lora.lora_dropout = 0.0
    return lora, (note,)


def _rows(base: PreTrainedModel, lora: LoraConfig, request: Finetune, out: Path, sink: ProgressSink) -> Iterator[Row]:
    """Measure each place of the experts on one load of the model. Its fp32 reference is last, in memory of its own."""
    tuned = _attach(base, lora, request.seed)
    initial = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _trained(tuned).items()}
    layers = [module for module in base.modules() if isinstance(module, FusedMoe)]
    planned = [layer.offload for layer in layers]
    for place in (place for place in request.experts if place != "reference"):
        for layer, offload in zip(layers, planned, strict=True):
            if place == "gpu" and offload is None:
                message = f"`{request.rule}` streams no experts to a GPU"
                raise request.refused(message, f"its parameter is `{STREAMED_TO}`")
            layer.offload = None if place == "cpu" or offload is None else replace(offload, min_tokens=1)
        _assign(tuned, initial)
        yield measured(tuned, request, place, out.parent / f"run-{place}", sink)
    if "reference" in request.experts:
        plain = _attach(reference_of(tuned, out, request, sink), lora, request.seed)
        _assign(plain, initial)
        yield measured(plain, request, "reference", out.parent / "run-reference", sink)


def _attach(model: PreTrainedModel, lora: LoraConfig, seed: int) -> PeftModel:
    torch.manual_seed(seed)
    return cast("PeftModel", get_peft_model(model, lora))


def _assign(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the trained tensors, all of which `values` has: rows begin with the same adapter."""
    trained = _trained(model)
    assert trained.keys() == values.keys(), "the models have the same modules"
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(values[name])


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
