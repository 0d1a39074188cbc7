"""`target_modules="all-linear"` on a compiled model: the layers that PEFT adapts on the stock one, without the experts.

Since 0.19 PEFT reads it as the linear layers of the attention and, by their former names, the router and the routed
experts. It leaves out shared experts. In: a config and the model that it is injected into. Out: the config with PEFT's
names of these layers, so that the saved adapter loads on the stock model. A warning (L438) explains how to add experts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from ktc.diagnostics import Diagnostic, render
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.peft_wrapper import ADAPTED, PUT_BY_PEFT

NAME = "all-linear"

log = logging.getLogger(__name__)


def resolve(config: Any, model: nn.Module) -> None:
    """Name the layers in `config` if it means all linear ones of a model with compiled experts."""
    modules = config.target_modules
    if not isinstance(modules, str) or modules.lower() != NAME:
        return
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    experts = [(name, module) for name, module in named if isinstance(module, FusedMoe)]
    if not experts:
        return
    asked = frozenset(cast("Iterable[str]", config.target_parameters or ()))
    converted = _converted(config, model)
    if not isinstance(converted.target_modules, str):
        config.target_modules = set(converted.target_modules)
        others = set(converted.target_parameters or ()) - (PUT_BY_PEFT - asked)
        config.target_parameters = sorted(others) or None
    if not any(".experts." in f".{name}" or name in PUT_BY_PEFT for name in asked):
        log.warning("%s", render([_without(*experts[0])]))


def _converted(config: Any, model: nn.Module) -> Any:
    """Return the config as PEFT changes it before it adapts a model of transformers 5; 0.18 changes nothing."""
    changed = copy.deepcopy(config)
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:
        return changed
    cast("Any", conversion).convert_peft_config_for_transformers(changed, model=model, conversions=None)
    return changed


def _without(name: str, module: FusedMoe) -> Diagnostic:
    path = ".".join(name.split(".")[-2:])
    names = ", ".join(f'"{path}.{name}"' for name in ADAPTED if name in module.weights.stock)
    hint = f"for the experts too: `target_parameters=[{names}]`, or the rules `moe-experts-lora`"
    return Diagnostic("L438", f"`{NAME}` adapts no routed experts", hint=hint, severity="warning")
