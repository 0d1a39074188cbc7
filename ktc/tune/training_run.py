"""One training run on a loaded model: add the adapter, set up and run TRL's trainer, and keep its results.

In: the paths, the settings and the data as tokens. Out: a `TrainResult`. Refused: layers to adapt that the model does
not have (T526), a load-balancing loss for a model without one (T506).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import datasets
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl.trainer.sft_config import SFTConfig

from ktc.diagnostics import Diagnostic, InputRefused, suggest
from ktc.hf.tokenizer import read_tokenizer
from ktc.model import peft_glue
from ktc.model.load import load
from ktc.training import KTSFTTrainer
from ktc.training.checkpoints import faults_named
from ktc.training.report import KTReport, report_of, write_report
from ktc.training.step_trace import StepTrace
from ktc.tune import run_folder
from ktc.tune.adapter_notes import adapter_notes
from ktc.tune.run_page import write_page
from ktc.tune.settings import TrainSettings
from ktc.tune.types import Observe, PreparedData, Progress, RunPaths, Stop, TrainResult


class TrainingRun:
    """Claims its folder when it begins and releases it when it ends, also after an error."""

    def __init__(
        self, paths: RunPaths, settings: TrainSettings, data: PreparedData, observe: Observe, stop: Stop
    ) -> None:
        self._paths, self._settings, self._data, self._observe, self._stop = paths, settings, data, observe, stop
        self._trace = None if paths.trace is None else StepTrace(paths.trace)
        self._open = ExitStack()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def finish(self) -> TrainResult:
        """Run to the end, or until `stop` is true. Raises HostLacks (T529) where the machine fails."""
        with faults_named(self._paths.output, f"the run in `{self._paths.output}` cannot continue"):
            return self._finish()

    def _finish(self) -> TrainResult:
        datasets.disable_progress_bars()  # they would overwrite ours
        set_seed(self._settings.seed)
        model = adapted(self._load(), self._paths.out, self._settings)
        args = arguments(self._paths.output, self._settings, has_held_out=self._data.held_out is not None, model=model)
        folder = self._claim() if args.process_index == 0 else None
        if folder is not None:
            self._observe("adapter", adapter_notes(self._paths, model))
        resume = folder.resume if folder else self._resumed()
        stopper = _Stopper(self._stop)
        trainer = self._trainer(model, args, stopper)
        self._observe("model", model)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        report = report_of(trainer).report(finished=not stopper.stopped)
        if folder is not None:
            self._keep(folder, trainer.model, report, stopper.stopped)
        return TrainResult(self._paths.output, report, self._data, stopper.stopped)

    def _load(self) -> PreTrainedModel:
        paths = self._paths
        reference = self._settings.precision == "fp32"
        return load(paths.out, weights=paths.weights, reference=reference, trust_remote_code=paths.trusted)

    def _claim(self) -> run_folder.RunFolder:
        paths = self._paths
        folder = run_folder.claim(paths.output, resume=paths.resume, force=paths.force)
        self._open.callback(folder.release)
        folder.keep_settings(self._settings)
        self._observe("folder", folder)
        return folder

    def _resumed(self) -> Path | None:
        """Return the checkpoint that rank 0 resumes from."""
        return run_folder.find_checkpoint(self._paths.output, self._paths.resume) if self._paths.resume else None

    def _trainer(self, model: PeftModel, args: SFTConfig, stopper: _Stopper) -> Any:
        held_out = self._data.held_out
        trainer: Any = KTSFTTrainer(
            model=model,
            args=args,
            train_dataset=self._data.train.dataset(),
            eval_dataset=None if held_out is None else held_out.dataset(),
            stack_micro_batches=self._settings.stack,
            processing_class=read_tokenizer(self._paths.out, "T507"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(stopper)
        if self._trace is not None:
            trainer.add_callback(self._trace)
        trainer.add_callback(_Narrator(self._observe, report_of(trainer)))
        if self._settings.early_stopping:
            trainer.add_callback(EarlyStoppingCallback(self._settings.early_stopping))
        if self._settings.tensorboard:
            trainer.add_callback(_tensorboard(self._paths.output))
        return trainer

    def _keep(self, folder: run_folder.RunFolder, model: PeftModel, report: Any, stopped: bool) -> None:
        write_report(folder.path, report)
        timeline = None if self._trace is None else self._trace.timeline
        write_page(folder.path, report, self._data, self._settings, timeline)
        if not stopped:
            folder.keep_adapter(model)
        self._observe("saved", folder.path)


# The adapter ---------------------------------------------------------------------------------------------------------
def adapted(model: PreTrainedModel, out: Path, settings: TrainSettings) -> PeftModel:
    """Return the model with the rules' adapter, changed by the settings. Raise InputRefused (T526, T527)."""
    config = lora_config(out, settings)
    if settings.targets:
        _check_targets(model, settings.targets)
    return cast("PeftModel", get_peft_model(model, config))


def lora_config(out: Path, settings: TrainSettings) -> LoraConfig:
    """Return the rules' `LoraConfig`, overridden by the settings. Without one, `targets` must name the layers."""
    try:
        config = peft_glue.read_lora_config(out)
    except InputRefused as error:
        if error.diagnostics[0].code != "L431" or not settings.targets:
            raise
        config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, task_type="CAUSAL_LM")
    if settings.rank is not None:
        config.r, config.rank_pattern = settings.rank, {}
    if settings.alpha is not None:
        config.lora_alpha, config.alpha_pattern = cast("int", settings.alpha), {}
    if settings.dropout is not None:
        config.lora_dropout = settings.dropout
    if settings.rslora is not None:
        config.use_rslora = settings.rslora
    if settings.targets:
        config.target_modules, config.target_parameters = list(settings.targets), None
    return config


def _check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Raise InputRefused (T526) for names that match no layer: PEFT ignores one of several."""
    modules: dict[str, nn.Module] = dict(cast("Any", model).named_modules())
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    faults: list[Diagnostic] = []
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            last = {name.rpartition(".")[2] for name in linears}
            hint = suggest(target, last) or f"there are {', '.join(f'`{name}`' for name in sorted(last))}"
            faults.append(Diagnostic("T526", f"the model has no linear layer `{target}`", hint=hint))
    if faults:
        raise InputRefused(*faults)


# The trainer ---------------------------------------------------------------------------------------------------------
def arguments(output: Path, settings: TrainSettings, *, has_held_out: bool, model: nn.Module) -> SFTConfig:
    """Return the settings as TRL's arguments."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    base = cast("PreTrainedModel", cast("Any", model).get_base_model())
    saving, evaluating = _rhythm(settings.save_steps), _rhythm(settings.eval_steps)
    if settings.early_stopping:
        saving = evaluating  # the best model must have been saved
    if settings.router_aux_loss and not hasattr(base.config.get_text_config(), "output_router_logits"):
        message = f"`router_aux_loss` is {settings.router_aux_loss:g}, and the model has no load-balancing loss"
        raise InputRefused(Diagnostic("T506", message, hint="leave it out"))
    known = {each.name for each in fields(SFTConfig)}
    # Its name since transformers 5.22; the other one still works there, with a warning.
    checkpointing = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in known)
    checkpointed: dict[str, Any] = {
        checkpointing: settings.gradient_checkpointing,
        f"{checkpointing}_kwargs": {"use_reentrant": False},
    }
    return SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.scheduler,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        bf16=settings.precision == "bf16" and base.dtype == torch.bfloat16,
        router_aux_loss_coef=settings.router_aux_loss,
        seed=settings.seed,
        logging_steps=settings.logging_steps,
        save_strategy=saving[0],
        save_steps=saving[1],
        save_total_limit=settings.save_total_limit,
        eval_strategy=evaluating[0] if has_held_out else "no",
        eval_steps=evaluating[1],
        load_best_model_at_end=bool(settings.early_stopping),
        metric_for_best_model="eval_loss" if settings.early_stopping else None,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        max_length=settings.length,
        packing=settings.packing,
        eval_packing=False,
        **checkpointed,
    )


def _rhythm(steps: int | None) -> tuple[str, int]:
    """Return the Trainer's strategy and number: by steps, or once per epoch."""
    return ("epoch", 1) if steps is None else ("steps", steps)


def _tensorboard(output: Path) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(output / "runs")))


class _Stopper(TrainerCallback):
    """Ends the run after a complete step, with a checkpoint. All processes stop at the same step."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.stopped = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if _any_process(self._stop(), args) and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True


def _any_process(asked: bool, args: TrainingArguments) -> bool:
    if args.world_size == 1:
        return asked
    import torch.distributed as dist

    flag = torch.tensor(int(asked), device=args.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


class _Narrator(TrainerCallback):
    """Reports the progress of the run."""

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
        if state.global_step % args.logging_steps:  # otherwise its log follows immediately
            self._tell(state)

    def _tell(self, state: TrainerState) -> None:
        found = Progress(state.global_step, state.max_steps, self._loss, self._report.recent_speed())
        self._observe("step", found)
