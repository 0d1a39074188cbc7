"""Settings tried on a small twin of the model, before the model is loaded or anything is written.

In: the paths, the settings and the data of a run. Out: nothing. PEFT adapts a stock model of the same config with two
layers, and TRL builds its trainer and optimizer for it in a temporary folder, with the first rows. Refused (T508): what
a library does not accept, with its words and the setting without which it does.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import match_target_against_key
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused, KtcError
from ktc.foundation.files import temporary_folder
from ktc.model import twin
from ktc.model.experts.trained.peft_wrapper import ADAPTED
from ktc.model.hf import stock_model
from ktc.model.hf.tokenizer import read_tokenizer
from ktc.model.loading import all_linear
from ktc.model.loading.load import stock_class
from ktc.model.loading.load_as import read_config
from ktc.model.manifest.manifest import read_manifest
from ktc.training.trainers.library_refusals import LibraryRefusal, refusal_in
from ktc.training.tune.arguments import arguments
from ktc.training.tune.lora import lora_config
from ktc.training.tune.methods import stock_trainer
from ktc.training.tune.settings import TrainSettings, types_of_settings
from ktc.training.tune.types import PreparedData, RunPaths

log = logging.getLogger(__name__)
_ROWS = 2
_OF_A_LAYER = re.compile(r".*\.\d+\.")


def rehearse(paths: RunPaths, settings: TrainSettings, data: PreparedData) -> None:
    """Raise `InputRefused` (T508) for settings that a library refuses. A model that has no twin is not tried."""
    config = _small_config(paths)
    if config is None:
        return
    refusal = _tried(paths, settings, data, config)
    if refusal is None:
        return
    to_blame = next((name for name in _changed(settings) if _passes(paths, settings, data, config, name)), None)
    what = "these settings" if to_blame is None else f"`{to_blame}` = {_shown(getattr(settings, to_blame))}"
    message = f"{refusal.library} refuses {what}: {refusal.words}"
    hint = "change the settings that it names"
    if to_blame is not None:
        hint = f"leave `--{to_blame.replace('_', '-')}` out, or give it another value; nothing was written"
    raise InputRefused(Diagnostic("T508", message, hint=hint))


def _small_config(paths: RunPaths) -> PreTrainedConfig | None:
    """Return the config of the twin; None for a model of its own code, or one that has no small config."""
    manifest = read_manifest(paths.out)
    if manifest.model.own_code:
        return None
    config = read_config(paths.out, stock_class(manifest, paths.out, paths.weights))
    try:
        config.architectures = [manifest.model.class_name]
        is_whole = stock_model.multimodal_class(config) is not None
        return twin.shrink(config if is_whole else config.get_text_config())
    except InputRefused:
        return None


def _tried(
    paths: RunPaths, settings: TrainSettings, data: PreparedData, config: PreTrainedConfig
) -> LibraryRefusal | None:
    """Build everything that a run builds of these settings, and return the refusal of a library."""
    model = _twin(settings, config)
    if model is None:
        return None
    try:
        with temporary_folder("train") as folder, torch.random.fork_rng(devices=[]):
            _build(folder, paths, settings, data, model)
    except KtcError:
        raise
    except Exception as error:
        if (refusal := refusal_in(error)) is None:
            raise
        return refusal
    return None


def _twin(settings: TrainSettings, config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the small model, None where it cannot be built: the settings may be valid all the same."""
    dtype = torch.float32 if settings.precision == "fp32" else config.dtype
    try:
        with torch.random.fork_rng(devices=[]):
            return stock_model.build(config, cast("torch.dtype", dtype or torch.float32))
    except Exception as error:  # noqa: BLE001 - code of models raises anything
        log.warning("settings are not tried before the run: its small twin cannot be built: %s", error)
        return None


def _build(folder: Path, paths: RunPaths, settings: TrainSettings, data: PreparedData, model: PreTrainedModel) -> None:
    settings = replace(settings, report_to=())  # nothing is reported yet
    lora = _for_twin(lora_config(paths.out, settings), model)
    if not lora.target_modules and not lora.target_parameters:
        return  # names that the twin does not have, nor the model perhaps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT reads; the user cannot change its code
        adapted = cast("PeftModel", get_peft_model(model, lora))
    train = data.train.first_rows(_ROWS).dataset()
    held_out = None if data.held_out is None else data.held_out.first_rows(_ROWS).dataset()
    trainer: Any = stock_trainer(settings.method)(
        model=adapted,
        args=arguments(folder, settings, has_held_out=held_out is not None, model=adapted),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=read_tokenizer(paths.out, "T507"),
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=settings.max_steps or 1)


def _for_twin(config: LoraConfig, model: nn.Module) -> LoraConfig:
    """Name the targets without the number of their layer, those that the twin has; it has the first layers alone."""
    modules = [str(name) for name, _ in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())]
    parameters = [str(name) for name, _ in cast("Iterable[tuple[str, Any]]", model.named_parameters())]
    targets = config.target_modules
    if not isinstance(targets, str):
        config.target_modules = list(_known(targets or (), modules))
    elif targets.lower() != all_linear.NAME and not any(match_target_against_key(targets, name) for name in modules):
        config.target_modules = None  # a pattern of later layers
    config.target_parameters = list(_known(config.target_parameters or (), parameters)) or None
    config.layers_to_transform = config.layers_pattern = None
    stacks = [name.rpartition(".")[2] in ADAPTED for name in config.target_parameters or ()]
    if stacks and all(stacks):
        config.lora_dropout = 0.0  # compiled experts take it, which stock PEFT does not know
    return config


def _known(targets: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    names = tuple(f".{name}" for name in names)
    shortened = dict.fromkeys(_OF_A_LAYER.sub("", target) for target in targets)
    return (target for target in shortened if any(name.endswith(f".{target}") for name in names))


def _changed(settings: TrainSettings) -> Iterator[str]:
    """Yield the settings that differ from their defaults, except for the data."""
    defaults = TrainSettings()
    for name in types_of_settings():
        if name not in ("data", "eval_data", "method") and getattr(settings, name) != getattr(defaults, name):
            yield name


def _passes(paths: RunPaths, settings: TrainSettings, data: PreparedData, config: PreTrainedConfig, name: str) -> bool:
    """Return whether the libraries accept the settings with the default of this one."""
    default = getattr(TrainSettings(), name)
    try:
        return _tried(paths, replace(settings, **{name: default}), data, config) is None
    except KtcError:
        return False


def _shown(value: object) -> str:
    return ",".join(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else str(value)
