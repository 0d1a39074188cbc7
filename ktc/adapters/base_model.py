"""The original model of an adapter: its folder and name, and the weights in it that an adapter can be on.

In: an adapter, and a folder (a compiled model or a checkpoint) where the adapter does not say it. Out: a `BaseModel`
with a frozen `Target` for each matrix. No weight is read: the stock class is built on meta. Refused: a base that is not
on this machine or is another model (A603), and one whose class is of its own code (A606).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ktc.adapters.adapter import Adapter, require_base
from ktc.adapters.folder import no_original, split_name
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.hf import stock_model
from ktc.model.hf.expert_layout import is_interleaved, is_transposed
from ktc.model.hf.foreign_errors import first_line
from ktc.model.loading.load import stock_class
from ktc.model.manifest import manifest as compiled

_STACKED = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix (out, in) of the stock model, or `experts` of them in one tensor, `transposed` if stored (E, in, out).

    `order` counts the tensors of its module: PEFT wraps the first innermost. `interleaved`: rows of gate and up
    alternate, where others have gate's before up's.
    """

    name: str  # as of a parameter: `model.layers.0.mlp.experts.gate_up_proj`, `model.layers.0.self_attn.q_proj.weight`
    out_features: int
    in_features: int
    experts: int = 0
    transposed: bool = False
    interleaved: bool = False
    order: int = 0

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """The last part of a stack's name; for a layer's weight, that of the layer's name."""
        return self.name.removesuffix(".weight").rpartition(".")[2]

    @property
    def is_gate_up(self) -> bool:
        return self.experts > 0 and self.leaf == "gate_up_proj"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """`name` is what adapters call it, `model` the stock class on meta, `linears` the names of its linear layers."""

    folder: Path
    name: str
    config: PreTrainedConfig
    model: PreTrainedModel
    targets: Mapping[str, Target]
    linears: frozenset[str]

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)


def find_base(adapter: Adapter, given: Path | None = None) -> BaseModel:
    """Return the model that `adapter` was trained on; `given` is a compiled model or a checkpoint."""
    base = _as_adapted(read_base(given if given is not None else _local(adapter)), adapter)
    if given is not None:
        require_base(adapter, base.name)
    return base


def _as_adapted(base: BaseModel, adapter: Adapter) -> BaseModel:
    """Return the text alone of a model with towers, if that has the layers of the adapter and the whole lacks them."""
    name = stock_model.text_class_name(base.config) if stock_model.has_towers(base.model) else None
    text_class = cast("type[PreTrainedModel] | None", getattr(transformers, name or "", None))
    layers = {_before_number(factor[0]) for entry in adapter.tensors if (factor := split_name(entry.name)) is not None}
    if text_class is None or _has_modules(base.model, layers):
        return base
    text = _built(base.config, text_class)
    if not _has_modules(text, layers):
        return base
    return replace(base, model=text, targets=targets_of(text), linears=linears_of(text))


def _before_number(name: str) -> str:
    """Return the name of the list that a layer is in: `model.layers` for `model.layers.0.mlp`."""
    return ".".join(itertools.takewhile(lambda part: not part.isdigit(), name.split(".")))


def _has_modules(model: nn.Module, names: Iterable[str]) -> bool:
    return set(names) <= {name for name, _ in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())}


def read_base(folder: Path) -> BaseModel:
    """Return the stock model of a compiled folder or a checkpoint. Raise `InputRefused` (A603, A606, L400 ...)."""
    name, model_class = str(folder.absolute()), None
    if (folder / compiled.FILE).is_file():
        manifest = compiled.read_manifest(folder)
        record = manifest.model
        model_class = None if record.own_code else stock_class(manifest, folder)
        folder, name = Path(record.folder), record.name
    if not (folder / "config.json").is_file():
        raise InputRefused(no_original(folder))
    try:
        config = cast("PreTrainedConfig", AutoConfig.from_pretrained(folder, trust_remote_code=False))
        vars(config).pop("auto_map", None)
        model = _built(config, model_class)
    except (OSError, ValueError, KeyError) as error:
        message = f"the installed transformers does not build `{folder.name}` by itself: {first_line(error)}"
        hint = "adapters of models with code of their own are used as they are, with that code"
        raise InputRefused(Diagnostic("A606", message, hint=hint)) from error
    return BaseModel(folder, name, config, model, targets_of(model), linears_of(model))


def _built(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None) -> PreTrainedModel:
    return stock_model.build_on_meta(config, cast("torch.dtype", config.dtype or torch.float32), model_class)


def linears_of(model: nn.Module) -> frozenset[str]:
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return frozenset(name for name, module in modules if isinstance(module, nn.Linear))


def targets_of(model: nn.Module) -> Mapping[str, Target]:
    """Return every matrix and every stack of experts' matrices, by parameter name."""
    targets: dict[str, Target] = {}
    for prefix, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        tensors = cast("Iterable[tuple[str, Tensor]]", module.named_parameters(recurse=False))
        for order, (leaf, tensor) in enumerate(tensors):
            name = f"{prefix}.{leaf}"
            if tensor.dim() == 3 and leaf in _STACKED:
                targets[name] = _stack(name, module, tensor, order)
            elif tensor.dim() == 2 and leaf == "weight" and not isinstance(module, nn.Embedding):
                targets[name] = Target(name, tensor.shape[0], tensor.shape[1], order=order)
    return targets


def _stack(name: str, module: nn.Module, tensor: Tensor, order: int) -> Target:
    transposed = is_transposed(module)
    experts, rows, columns = (int(size) for size in tensor.shape)
    out_features, in_features = (columns, rows) if transposed else (rows, columns)
    interleaved = name.endswith("gate_up_proj") and is_interleaved(module)
    return Target(name, out_features, in_features, experts, transposed, interleaved, order)


def _local(adapter: Adapter) -> Path:
    """Return the folder of the base that the adapter names: a path, or in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if adapter.base and Path(adapter.base).is_dir():
        return Path(adapter.base)
    try:
        cached = try_to_load_from_cache(adapter.base, "config.json") if adapter.base else None
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    what = f"its base `{adapter.base}` is not on this machine" if adapter.base else "it names no base model"
    message = f"the model of adapter `{adapter.folder.name}` cannot be found: {what}"
    raise InputRefused(Diagnostic("A603", message, hint="say where the model is: `--model FOLDER`"))
