"""One training run on a loaded model: add the adapter, set up and run TRL's trainer, and keep its results.

In: the paths, the settings and the data as tokens. Out: a `TrainResult`. Refused before the model is loaded: settings
that a library refuses (T508). Nothing is written before the trainer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import PeftModel
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment
from ktc.model.hf.tokenizer import read_tokenizer
from ktc.model.loading.load import load
from ktc.training.trainers import gradients
from ktc.training.trainers.checkpoints import faults_named
from ktc.training.trainers.library_refusals import refused_by_libraries
from ktc.training.trainers.report import KTReport, report_of, write_report
from ktc.training.trainers.step_trace import StepTrace
from ktc.training.tune import run_folder
from ktc.training.tune.adapter_card import write_card
from ktc.training.tune.adapter_notes import adapter_notes
from ktc.training.tune.arguments import arguments
from ktc.training.tune.image_rows import ImageCollator, open_processor
from ktc.training.tune.lora import adapted
from ktc.training.tune.methods import Arguments, compiled_trainer
from ktc.training.tune.rehearsal import rehearse
from ktc.training.tune.run_page import write_page
from ktc.training.tune.sample_answer import SampleAnswer, answered, sample_of
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.types import Observe, PreparedData, Progress, RunPaths, Stop, TrainResult

# TRL's copy of an adapter that it is given, as the reference of preferences. A new adapter adds nothing, so the model
# without it is the same reference; the copy would be saved in every checkpoint.
_REFERENCE = "ref"
_HINT = "change the settings that the message names; nothing was written"


class TrainingRun:
    """A run that claims its folder when it begins and releases it when it ends, also after an error."""

    def __init__(
        self, paths: RunPaths, settings: TrainSettings, data: PreparedData, observe: Observe, stop: Stop
    ) -> None:
        self._paths, self._settings, self._data, self._observe, self._stop = paths, settings, data, observe, stop
        self._trace = None if paths.trace is None else StepTrace(paths.trace)
        self._open = ExitStack()

    def finish(self) -> TrainResult:
        """Run to the end, or until `stop` is true. Raises HostLacks (T529) where the machine fails."""
        with self._open, faults_named(self._paths.output, f"the run in `{self._paths.output}` cannot continue"):
            return self._finish()

    def _finish(self) -> TrainResult:
        datasets.disable_progress_bars()  # they would overwrite ours
        if environment.world_size() == 1:  # with several, the trainer of the twin would open their group of processes
            rehearse(self._paths, self._settings, self._data)
        set_seed(self._settings.seed)
        stopper = _Stopper(self._stop)
        loaded = load(
            self._paths.out,
            weights=self._paths.weights,
            reference=self._settings.precision == "fp32",
            trust_remote_code=self._paths.trusted,
        )
        with _leaving_nothing(self._paths.output), refused_by_libraries("T508", "the settings", _HINT):
            model = adapted(loaded, self._paths.out, self._settings)
            has_held_out = self._data.held_out is not None
            args = arguments(self._paths.output, self._settings, has_held_out=has_held_out, model=model)
            if self._has_images:
                args.remove_unused_columns = False  # the collator reads the names of images
            trainer = self._trainer(model, args, stopper)
        folder = self._claim(stopper) if args.process_index == 0 else None
        if folder is not None:
            self._observe("adapter", adapter_notes(self._paths, model))
        resume = folder.resume if folder else self._checkpoint_of_rank_0()
        if self._settings.tensorboard or "tensorboard" in self._settings.report_to:
            trainer.add_callback(_tensorboard(self._paths.output))
        self._observe("model", model)
        sample = self._sample(trainer) if folder is not None and environment.world_size() == 1 else None
        try:
            trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        except _NoStepLeft:
            report_of(trainer).end()
            if folder is not None:
                self._observe("trained", (_no_step(trainer.state),))
        except InputRefused:
            if folder is not None and resume is None and not trainer.state.global_step:
                folder.discard()  # refused in its first step
            raise
        report = report_of(trainer).report(finished=not stopper.stopped)
        if folder is not None and (stopper.steps or not folder.has_adapter):
            if sample is not None:
                sample = answered(sample, trainer, trainer.processing_class, after=True)
            self._keep(folder, trainer.model, report, stopper.stopped, sample)
        return TrainResult(self._paths.output, report, self._data, stopper.stopped)

    def _claim(self, stopper: _Stopper) -> run_folder.RunFolder:
        paths = self._paths
        folder = run_folder.claim(paths.output, resume=paths.resume, force=paths.force)
        self._open.callback(folder.release)
        if folder.resume is None:
            folder.keep_settings(self._settings, self._data.train)
        else:  # that has its own, until a step is left to train
            stopper.begin = partial(folder.keep_settings, self._settings, self._data.train)
        self._observe("folder", folder)
        return folder

    def _checkpoint_of_rank_0(self) -> Path | None:
        return run_folder.find_checkpoint(self._paths.output, self._paths.resume) if self._paths.resume else None

    def _trainer(self, model: PeftModel, args: Arguments, stopper: _Stopper) -> Any:
        held_out = self._data.held_out
        rows = self._data.train.dataset()
        if self._settings.method == "kto":
            rows = rows.shuffle(seed=self._settings.seed)  # TRL takes them in order
        trainer: Any = compiled_trainer(self._settings.method)(
            model=model,
            args=args,
            train_dataset=rows,
            eval_dataset=None if held_out is None else held_out.dataset(),
            stack_micro_batches=self._settings.stack,
            processing_class=read_tokenizer(self._paths.out, "T507"),
        )
        if self._has_images:
            processor = open_processor(self._paths.out, self._paths.trusted)
            trainer.data_collator = ImageCollator(trainer.data_collator, processor)
        if _REFERENCE in model.peft_config:
            model.delete_adapter(_REFERENCE)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(stopper)
        if self._trace is not None:
            trainer.add_callback(self._trace)
        trainer.add_callback(_ProgressReporter(self._observe, report_of(trainer)))
        if trainer.stacker.compiles(model):
            self._observe("compiling", None)
        if self._settings.early_stopping:
            trainer.add_callback(EarlyStoppingCallback(self._settings.early_stopping))
        return trainer

    @property
    def _has_images(self) -> bool:
        data = self._data
        return bool(data.train.images or (data.held_out is not None and data.held_out.images))

    def _sample(self, trainer: Any) -> SampleAnswer | None:
        """Return a row for the report, with the answer of the model before its training."""
        sample = sample_of(self._data, trainer.processing_class)
        return None if sample is None else answered(sample, trainer, trainer.processing_class, after=False)

    def _keep(
        self, folder: run_folder.RunFolder, model: PeftModel, report: Any, stopped: bool, sample: SampleAnswer | None
    ) -> None:
        write_report(folder.path, report)
        timeline = None if self._trace is None else self._trace.timeline
        write_page(folder.path, report, self._data, self._settings, timeline, sample)
        if not stopped:
            folder.keep_adapter(model)
            write_card(folder.path, report, self._data, self._settings)
        self._observe("saved", folder.path)


@contextmanager
def _leaving_nothing(output: Path) -> Generator[None]:
    """Remove the folder that the trainer makes when it is built, and those above it, if an error follows."""
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # there is none, or another process has written into it
            for folder in made:
                folder.rmdir()
        raise


def _tensorboard(output: Path) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(output / "runs")))


class _Stopper(TrainerCallback):
    """Ends the run after a complete step, with a checkpoint. All processes stop at the same step.

    A resumed run has the intervals of its settings: transformers takes those of the checkpoint. It has no step beyond
    its last: transformers compares their number with that of the run after a step alone. `begin` is called before the
    first step.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.stopped = False
        self.steps = 0
        self.begin: Callable[[], None] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            raise _NoStepLeft
        state.compute_steps(args, state.max_steps)
        if self.begin is not None:
            self.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.steps += 1
        if _any_process(self._stop(), args) and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True


class _NoStepLeft(BaseException):
    """Ends a resumed run that had all its steps before, in all of its processes; none of them has failed."""


def _no_step(state: TrainerState) -> Diagnostic:
    """Return the warning (T550) of a run that had all its steps already."""
    message = f"nothing was trained: the checkpoint has {state.global_step} steps, and the run has {state.max_steps}"
    hint = "`--epochs` or `--max-steps` with a larger number continues it"
    return Diagnostic("T550", message, hint=hint, severity="warning")


def _any_process(asked: bool, args: TrainingArguments) -> bool:
    if args.world_size == 1:
        return asked
    import torch.distributed as dist

    flag = torch.tensor(int(asked))  # by gloo: no process waits for its GPU
    group = gradients.open_groups((), timedelta(seconds=args.ddp_timeout))["cpu"]
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


class _ProgressReporter(TrainerCallback):
    def __init__(self, observe: Observe, report: KTReport) -> None:
        self._observe, self._report = observe, report
        self._loss: float | None = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if "loss" in (logs or {}):
            self._loss = (logs or {})["loss"]
            self._tell(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % args.logging_steps:  # otherwise its log follows, at once or within the next step
            self._tell(state)

    def _tell(self, state: TrainerState) -> None:
        speed = self._report.recent_speed()
        self._observe("step", Progress(state.global_step, state.max_steps, self._loss, speed))
