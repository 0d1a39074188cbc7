"""Real optimizer steps of a model with an adapter, measured: a row.

In: a model, a request and the place of its experts. Out: a row, and the timeline of a step where the request names a
file. The reference trains in fp32 on the CPU, one micro-batch after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ktc.foundation import environment
from ktc.tools.bench.finetune.report import Row, Split, median_step
from ktc.tools.bench.machine import host_peak, peaks, reset_peaks
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.requests import Finetune
from ktc.tools.bench.rounds import StepClock
from ktc.training import KTrainer
from ktc.training.trainers.report import report_of
from ktc.training.trainers.step_trace import TRACED_STEP, StepTrace


def token_ids(request: Finetune, vocabulary: int) -> Tensor:
    """Return the tokens of all steps: int64 (steps * accumulation, length), the same for every implementation."""
    generator = torch.Generator().manual_seed(request.seed)
    return torch.randint(vocabulary, (request.steps * request.accumulation, request.length), generator=generator)


def measured(
    model: PeftModel,
    request: Finetune,
    place: str,
    folder: Path,
    sink: ProgressSink,
    name: str | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Row:
    """Train `model` for the steps of a request by `KTrainer`. Raises what the trainer raises.

    Progress has the `name`, by default that of the place.
    """
    ids = token_ids(request, int(cast("Any", model).config.vocab_size))
    data: Any = [{"input_ids": row, "labels": row} for row in ids]
    name = name or ("the reference" if place == "reference" else f"experts on the {place}")
    clock = StepClock(sink.steps(name, request.steps))
    reset_peaks()
    trainer = KTrainer(
        model=model,
        args=_arguments(request, place, folder, on_cpu=_on_cpu(model)),
        train_dataset=data,
        callbacks=[_Steps(clock), *callbacks],
        stack_micro_batches="off" if place == "reference" else "auto",
    )
    trainer.remove_callback(PrinterCallback)
    trace = request.trace_of(place)
    if trace is not None:
        trainer.add_callback(_Trace(trace, clock))  # behind the report, which does not time its writing
    trainer.train()
    report = report_of(trainer).report(finished=True)
    return row_of(
        request,
        clock.seconds,
        impl="ktc",
        experts=place,
        split=Split(1, request.accumulation),
        losses=tuple(step.loss for step in report.history if step.loss is not None),
        grad_norms=tuple(step.grad_norm for step in report.history if step.grad_norm is not None),
        phases=report.phases,
        stacking=report.stacking,
        streams=report.streams,
        offload="; ".join(filter(None, (report.offload, report.expert_adapters))),
    )


def row_of(request: Finetune, seconds: list[float], **facts: Any) -> Row:
    """Return the row of measured steps; `facts` are its other fields."""
    traced = TRACED_STEP if request.trace is not None and facts["impl"] == "ktc" else None
    step = median_step(seconds, traced)
    # On a GPU, the reference would have the peaks of the compiled model, which waits.
    allocated, reserved = (0, 0) if facts["experts"] == "reference" else peaks()
    return Row(
        tokens_per_second=request.tokens / step,
        step_time=step,
        step_times=tuple(seconds),
        gpu_allocated=allocated,
        gpu_reserved=reserved,
        host_peak_rss=host_peak(),
        **facts,
    )


def _on_cpu(model: PeftModel) -> bool:
    """Return whether the model takes its tokens on the CPU, where the trainer would send them to a GPU."""
    return not torch.cuda.is_available() or cast("Any", model).get_input_embeddings().weight.device.type == "cpu"


def _arguments(request: Finetune, place: str, folder: Path, *, on_cpu: bool) -> TrainingArguments:
    reference = place == "reference"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=request.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=request.accumulation // environment.world_size(),
        learning_rate=1e-4,
        bf16=not reference,
        use_cpu=reference or on_cpu,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


class _Steps(TrainerCallback):
    """Times the trainer's steps, with the loading of their data.

    A trainer may begin the next step before a GPU has ended this one. So the first and the last alone wait for it.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._clock.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *given: Any, **kwargs: Any) -> None:
        if state.global_step in (1, state.max_steps):
            self._clock.step()
        else:
            self._clock.passed()


class _Trace(StepTrace):
    """Traces a step. Its file is written between two steps of the clock."""

    def __init__(self, path: Path, clock: StepClock) -> None:
        super().__init__(path)
        self._clock = clock

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        super().on_step_end(args, state, control)
        self._clock.start()
