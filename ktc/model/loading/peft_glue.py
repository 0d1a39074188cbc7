"""Adapters on a compiled model: PEFT's own dispatch handles `FusedLinear`, and receives a wrapper for `FusedMoe`.

`install` is called when a compiled model is imported or loaded. `read_lora_config` makes the stock `LoraConfig` of
the rules' `lora` block and the chosen nodes.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, LoraModel
from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.peft_wrapper import ASKED, AskedTargets, ExpertsParamWrapper
from ktc.model.hf.lora_values import value_faults
from ktc.model.hf.private_api import register_layers
from ktc.model.linears.merged_lora import MergedLoraLinear
from ktc.model.linears.trained_linear import TrainedLinear
from ktc.model.loading import all_linear

FILE = "lora.json"
_INSTALLED = "_ktc_installed"


def install() -> None:
    """Make every `LoraConfig` that is built from now on know ktc's modules, and `all-linear` of compiled models.

    The class is patched, since PEFT, TRL and LLaMA-Factory build their configs themselves. A second call changes
    nothing.
    """
    original = cast("Any", LoraConfig).__post_init__
    if getattr(original, _INSTALLED, False):
        return

    @functools.wraps(original)
    def with_modules(self: LoraConfig) -> None:
        original(self)
        if self.base_model_name_or_path is None:  # an adapter that is read names its base, and was checked when made
            setattr(self, ASKED, AskedTargets.of(self))
        register_layers(self, {FusedMoe: ExpertsParamWrapper, TrainedLinear: MergedLoraLinear})

    setattr(with_modules, _INSTALLED, True)
    cast("Any", LoraConfig).__post_init__ = with_modules
    inject = cast("Any", LoraModel).inject_adapter

    @functools.wraps(inject)
    def inject_adapter(self: LoraModel, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        all_linear.resolve(cast("Any", self).peft_config[adapter_name], model)
        return inject(self, model, adapter_name, *args, **kwargs)

    cast("Any", LoraModel).inject_adapter = inject_adapter


def read_lora_config(folder: Path) -> LoraConfig:
    """Return the stock `LoraConfig` of the compiled model in `folder`. Raise `InputRefused` (L431) without one."""
    try:
        content: object = read_json(read_regular(folder / FILE))
    except (OSError, ValueError) as error:
        raise InputRefused(
            Diagnostic("L402", f"`{folder / FILE}` is damaged: {error}", hint="compile it again")
        ) from error
    if content is None:
        hint = "compile by rules that have one (`moe-lora`), or name layers: `--targets all-linear`, or a `LoraConfig`"
        raise InputRefused(Diagnostic("L431", f"the rules of `{folder.name}` define no adapter", hint=hint))
    install()
    values: dict[str, Any] = cast("dict[str, Any]", content) if isinstance(content, dict) else {"": content}
    faults = list(value_faults(values))
    if unknown := sorted(values.keys() - {field.name for field in fields(LoraConfig)}):
        faults.append(f"`{unknown[0]:.40}` is not known")
    try:
        if not faults:
            return LoraConfig(**values)
    except (TypeError, ValueError) as error:
        faults.append(str(error).partition("\n")[0][:200])
    raise InputRefused(Diagnostic("L402", f"`{folder / FILE}` is damaged: {faults[0]}", hint="compile it again"))
