"""ktc's rows: the model compiled and loaded once, and real optimizer steps by `KTrainer` for each place of its experts.

In: a request and its layers. Out: rows. Refused: what the compiler and the trainer refuse, and experts on a GPU to
which the program streams none (U030).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ktc import compiler
from ktc.bench.finetune.device import StepClock, host_peak, peaks, reset_peaks, token_ids
from ktc.bench.finetune.memory import require_room
from ktc.bench.finetune.report import Row, Split, median_step
from ktc.bench.finetune.request import STREAMED_TO, Place, Request, refused
from ktc.bench.finetune.stack import Stack
from ktc.bench.finetune.watch import Watch
from ktc.experts.module import FusedMoe
from ktc.model import peft_glue
from ktc.model.load import load
from ktc.plan import Point
from ktc.training import KTrainer
from ktc.training.report import report_of


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


def rows(
    base: PreTrainedModel, request: Request, out: Path, watch: Watch, callbacks: Sequence[TrainerCallback] = ()
) -> list[Row]:
    """Measure each place of the experts on one load of the model."""
    torch.manual_seed(request.seed)
    tuned = cast("PeftModel", get_peft_model(base, peft_glue.read_lora_config(out)))
    found: list[Row] = []
    layers = [module for module in base.modules() if isinstance(module, FusedMoe)]
    planned = [layer.offload for layer in layers]
    for place in request.experts:
        for layer, offload in zip(layers, planned, strict=True):
            if place == "gpu" and offload is None:
                raise refused(f"`{request.rule}` streams no experts to a GPU", f"its parameter is `{STREAMED_TO}`")
            layer.offload = None if place == "cpu" or offload is None else replace(offload, min_tokens=1)
        found.append(_row(tuned, request, place, out.parent / f"run-{place}", watch, callbacks))
    return found


def _row(
    model: PeftModel, request: Request, place: Place, folder: Path, watch: Watch, callbacks: Sequence[TrainerCallback]
) -> Row:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=request.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=request.accumulation,
        learning_rate=1e-4,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    ids = token_ids(request, int(cast("Any", model).config.vocab_size))
    data: Any = [{"input_ids": row, "labels": row} for row in ids]
    clock = _Clock(watch, request.steps, f"experts on the {place}")
    reset_peaks()
    trainer = KTrainer(model=model, args=arguments, train_dataset=data, callbacks=[clock, *callbacks])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    measured, (allocated, reserved) = report_of(trainer).report(finished=True), peaks()
    step = median_step(clock.clock.seconds)
    return Row(
        impl="ktc",
        experts=place,
        split=Split(1, request.accumulation),
        tokens_per_second=request.tokens / step,
        step_time=step,
        step_times=tuple(clock.clock.seconds),
        gpu_allocated=allocated,
        gpu_reserved=reserved,
        host_peak_rss=host_peak(),
        losses=tuple(each.loss for each in measured.history if each.loss is not None),
        phases=measured.phases,
        stacking=measured.stacking,
    )


class _Clock(TrainerCallback):
    """Times the trainer's steps, with the loading of their data."""

    def __init__(self, watch: Watch, steps: int, what: str) -> None:
        self.clock = StepClock()
        self._watch, self._steps, self._what = watch, steps, what

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._watch.progress(self._what, 0, self._steps)
        self.clock.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.step()
        seconds = self.clock.seconds
        self._watch.progress(self._what, len(seconds), self._steps)
        self._watch.told(f"{self._what}: step {len(seconds)} of {self._steps}, {seconds[-1]:.2f} s")
