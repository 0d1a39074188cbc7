"""The adapter of a training run: the `LoraConfig` of the rules, changed by the settings, on a model.

Refused: layers to adapt that the model does not have (T526).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused, suggest
from ktc.model.loading import all_linear, peft_glue
from ktc.training.tune.settings import TrainSettings

_ALONE = "give it alone: it means the layers that PEFT adapts on the stock model, without the routed experts"


def adapted(model: PreTrainedModel, out: Path, settings: TrainSettings) -> PeftModel:
    """Return the model with the rules' adapter, changed by the settings. Raise InputRefused (T526, T527)."""
    config = lora_config(out, settings)
    if settings.targets and not _adapts_all(settings):
        _check_targets(model, settings.targets)
    return cast("PeftModel", get_peft_model(model, config))


def lora_config(out: Path, settings: TrainSettings) -> LoraConfig:
    """Return the rules' `LoraConfig`, overridden by the settings. Without one, `targets` must name the layers.

    Raise `InputRefused` (T526) for `all-linear` beside other names.
    """
    if len(settings.targets) > 1 and all_linear.NAME in (target.lower() for target in settings.targets):
        message = f"`{all_linear.NAME}` excludes other names, and `targets` has some"
        raise InputRefused(Diagnostic("T526", message, hint=_ALONE))
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
    if _adapts_all(settings):
        config.target_modules, config.target_parameters = all_linear.NAME, None
        if settings.dropout is None:
            config.lora_dropout = 0.0  # PEFT takes none with the router, whose weight it adapts by its name
    elif settings.targets:
        config.target_modules, config.target_parameters = list(settings.targets), None
    return config


def _adapts_all(settings: TrainSettings) -> bool:
    return [target.lower() for target in settings.targets] == [all_linear.NAME]


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
