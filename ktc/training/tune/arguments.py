"""The settings of a run as the arguments of TRL's trainer.

Refused: a load-balancing loss for a model without one (T506).
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment
from ktc.training.tune.methods import Arguments, arguments_class, arguments_of_method
from ktc.training.tune.settings import TrainSettings


def arguments(output: Path, settings: TrainSettings, *, has_held_out: bool, model: nn.Module) -> Arguments:
    """Return the settings as TRL's arguments."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    base = cast("PreTrainedModel", cast("Any", model).get_base_model())
    saving, evaluating = _strategy(settings.save_steps), _strategy(settings.eval_steps)
    if settings.early_stopping:
        saving = evaluating  # the best model must have been saved
    if settings.router_aux_loss and not hasattr(base.config.get_text_config(), "output_router_logits"):
        message = f"`router_aux_loss` is {settings.router_aux_loss:g}, and the model has no load-balancing loss"
        raise InputRefused(Diagnostic("T506", message, hint="leave it out"))
    chosen = arguments_class(settings.method)
    known = {option.name for option in fields(chosen)}
    # Its name since transformers 5.22; the other one still works there, with a warning.
    checkpointing = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in known)
    checkpointed: dict[str, Any] = {
        checkpointing: settings.gradient_checkpointing,
        f"{checkpointing}_kwargs": {"use_reentrant": False},
    }
    return chosen(
        output_dir=str(output),
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulation // _sharing(),
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
        report_to=[name for name in settings.report_to if name != "tensorboard"],
        disable_tqdm=True,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        max_length=settings.length,
        **arguments_of_method(settings),
        **checkpointed,
    )


def _sharing() -> int:
    """Return the number of processes that share the micro-batches of a step. Under torchrun each has all of them."""
    return 1 if environment.started_for() is None else environment.world_size()


def _strategy(steps: int | None) -> tuple[str, int]:
    """Return the Trainer's strategy and number: by steps, or once per epoch."""
    return ("epoch", 1) if steps is None else ("steps", steps)
