"""ktc's rows: the model compiled and loaded once, and real optimizer steps for each place of its experts.

In: a request and its layers. Out: rows, each from the same adapter. Refused: what the compiler and the trainer refuse,
and experts on a GPU to which the program streams none (U030).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from peft import LoraConfig
from transformers import PreTrainedModel

from ktc import compiler
from ktc.model.experts.module import FusedMoe
from ktc.model.loading import peft_glue
from ktc.model.loading.load import load
from ktc.stages.plan import Point
from ktc.tools.bench.finetune import adapter
from ktc.tools.bench.finetune.memory import require_room
from ktc.tools.bench.finetune.reference import reference_of
from ktc.tools.bench.finetune.report import Row
from ktc.tools.bench.finetune.request import STREAMED_TO, Place, Request, refused
from ktc.tools.bench.finetune.steps import measured
from ktc.tools.bench.stack import Stack
from ktc.tools.bench.watch import Watch


def compiled(request: Request, stack: Stack, out: Path, watch: Watch) -> Path:
    """Compile the layers into `out`. Raises HostLacks (H240) if they do not fit, and what `compile` raises."""
    analysis = compiler.analyse(
        stack.model,
        request.rule,
        request.settings,
        observe=watch.stage,
        asked=Point(1, request.length),
        to_compile=True,
        random_weights=request.random_weights,
    )
    require_room(analysis, request)
    return compiler.complete(analysis, out, request.settings, watch.stage)


def loaded(request: Request, out: Path, watch: Watch) -> PreTrainedModel:
    """Load the compiled model, with random weights or its own."""

    def progress(done: int, total: int) -> None:
        watch.progress("weights", done, total)

    return load(out, random_weights=request.seed if request.random_weights else None, progress=progress)


def lora_of(request: Request, out: Path) -> tuple[LoraConfig, tuple[str, ...]]:
    """Return the adapter of all rows, and notes about what differs from the compiled model's own."""
    lora = peft_glue.read_lora_config(out)
    if not request.compared or not lora.lora_dropout:
        return lora, ()
    note = f"dropout is 0 instead of {lora.lora_dropout:g}: its draws differ between devices, and rows are compared"
    lora.lora_dropout = 0.0
    return lora, (note,)


def rows(base: PreTrainedModel, lora: LoraConfig, request: Request, out: Path, watch: Watch) -> Iterator[Row]:
    """Measure each place of the experts on one load of the model. Its fp32 reference is last, in memory of its own."""
    tuned = adapter.attach(base, lora, request.seed)
    initial = adapter.values(tuned)
    layers = [module for module in base.modules() if isinstance(module, FusedMoe)]
    planned = [layer.offload for layer in layers]
    for place in packed_places(request):
        for layer, offload in zip(layers, planned, strict=True):
            if place == "gpu" and offload is None:
                raise refused(f"`{request.rule}` streams no experts to a GPU", f"its parameter is `{STREAMED_TO}`")
            layer.offload = None if place == "cpu" or offload is None else replace(offload, min_tokens=1)
        adapter.assign(tuned, initial)
        yield measured(tuned, request, place, out.parent / f"run-{place}", watch)
    if "reference" in request.experts:
        plain = adapter.attach(reference_of(tuned, out, request, watch), lora, request.seed)
        adapter.assign(plain, initial)
        yield measured(plain, request, "reference", out.parent / "run-reference", watch)


def packed_places(request: Request) -> tuple[Place, ...]:
    """Return the places of the model that the request compiles."""
    return tuple(place for place in request.experts if place != "reference")
