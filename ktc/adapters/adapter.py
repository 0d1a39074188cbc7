"""Adapter folders as PEFT saves them, and attaching one to a model.

In: a folder. Out: a frozen `Adapter`. Only headers are read until an adapter is attached. Refused: a missing adapter
(A601), a damaged or half-written one (A602), one of another model (A603), one of a kind that does not attach (A604),
and one that PEFT loads only in part (A605).
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from ktc.adapters.as_trained import cast_as_trained
from ktc.adapters.folder import (
    CONFIG,
    WEIGHTS,
    config_faults,
    damaged,
    no_adapter,
    read_config,
    read_entries,
    split_name,
    tensor_faults,
)
from ktc.adapters.plain import variants
from ktc.adapters.saved_modules import require_registered
from ktc.diagnostics import Diagnostic, InputRefused, listing, render
from ktc.foundation.timed_search import Invalid, TooMuchWork, search
from ktc.model.checkpoint.adapter_uses import other_layout
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.hf.lora_values import patterns_of

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_PLAIN_NAME = re.compile(r"[\w.-]*")
_FLAGS = re.compile(r"((?:\(\?[aiLmsux]+\))*)(.*)", re.DOTALL)  # such as `(?i)`, which come first
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter on disk. `config` is the whole of its adapter_config.json; `base` the model it names, or ""."""

    folder: Path
    base: str
    config: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]  # names as in the file, shapes, dtypes; by the order of their bytes

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def kind(self) -> str:
        """PEFT's name of its kind: `LORA`, `LOHA` ..."""
        return str(self.config["peft_type"])

    @property
    def r(self) -> int:
        return int(self.config["r"])

    @property
    def lora_alpha(self) -> float:
        return float(self.config["lora_alpha"])

    def names(self, key: str) -> tuple[str, ...]:
        """Return the list of names that the config has for `key`, empty if it has none."""
        return tuple(map(str, self.config.get(key) or ()))


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in `folder`. Raise `InputRefused` (A601, A602, A604) with all faults."""
    if not (folder / CONFIG).is_file() and not (folder / WEIGHTS).is_file():
        raise InputRefused(no_adapter(folder))
    problems: list[Diagnostic] = []
    config = read_config(folder, problems)
    tensors = read_entries(folder, problems)
    if config is not None:
        problems += config_faults(folder, config, tensors)
    if config is not None and not problems:
        problems += tensor_faults(folder, config, tensors)
    if problems or config is None:
        raise InputRefused(*problems)
    return Adapter(folder, str(config.get("base_model_name_or_path") or ""), config, tensors)


def require_lora(adapter: Adapter) -> Adapter:
    """Return `adapter`. Raise `InputRefused` (A604) for another kind than LoRA, whose weight is `W + s B A`."""
    if adapter.kind == "LORA":
        return adapter
    message = f"adapter `{adapter.folder}` is of kind `{adapter.kind}`; exports and merges read LoRA"
    raise InputRefused(Diagnostic("A604", message, hint="attach it (`ktc generate --adapter`), or train with LoRA"))


def require_base(adapter: Adapter, model_name: str) -> None:
    """Raise `InputRefused` (A603) if the adapter names another model. Folders are compared by their last name."""
    if adapter.base and PurePath(adapter.base).name != PurePath(model_name).name:
        message = f"adapter `{adapter.folder.name}` is of `{adapter.base}`, not of `{model_name}`"
        hint = f"if that is the same model, name it in `base_model_name_or_path` of `{adapter.folder / CONFIG}`"
        raise InputRefused(Diagnostic("A603", message, hint=hint))


def require_fit(adapter: Adapter, model: nn.Module, model_name: str) -> None:
    """Raise `InputRefused` if the model lacks a layer of the adapter, has another size (A603), or is fixed (A604)."""
    require_base(adapter, model_name)
    modules = {str(name): module for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())}
    require_quick_patterns(adapter, list(modules))
    require_registered(adapter, model, model_name)
    whole = not adapter.config.get("use_bdlora")  # whose factors are blocks of the layer's
    wrong = [fault for entry in adapter.tensors if (fault := _misfit(entry, modules, whole))]
    if wrong:
        whose = f"of `{adapter.base}`" if adapter.base else "without a base"
        message = f"adapter `{adapter.folder.name}` {whose} does not fit `{model_name}`: {wrong[0]}"
        more = f" ({len(wrong) - 1} more tensors do not fit)" if len(wrong) > 1 else ""
        raise InputRefused(Diagnostic("A603", message + more, hint="use the model that the adapter was trained on"))


def require_quick_patterns(adapter: Adapter, names: Sequence[str]) -> None:
    """Raise `InputRefused` (A602) for a regular expression that PEFT could not finish on these names of modules."""
    patterns = [pattern for pattern in patterns_of(adapter.config) if not _PLAIN_NAME.fullmatch(pattern)]
    if not patterns:
        return
    try:
        matches = search([_FLAGS.sub(r"\1^(.*\\.)?(\2)$", pattern, count=1) for pattern in patterns], names)
    except TooMuchWork as error:
        message = f"the pattern `{patterns[error.index]:.100}` of `{CONFIG}` cannot be searched: {error}"
        raise InputRefused(damaged(adapter.folder, message)) from error
    for pattern, names_found in zip(patterns, matches, strict=True):
        if isinstance(names_found, Invalid):
            message = f"the pattern `{pattern:.100}` of `{CONFIG}` is invalid: {names_found.reason}"
            raise InputRefused(damaged(adapter.folder, message))


def attach(
    model: PreTrainedModel, folder: Path, *, alone: bool = True, trainable: bool = False, adapter_name: str = "default"
) -> PeftModel:
    """Attach the adapter in `folder` to a loaded model, compiled or stock, by stock PEFT, in place and in eval mode.

    `alone`: the model has no other adapter, and is not used without this one. Then its load may change weights of the
    model, as PiSSA or trained biases do; `detach` puts them back. One that is not trainable is computed in the model's
    dtype, see `cast_as_trained`.

    Raise `InputRefused`: the errors of `read_adapter` and `require_fit`, A603 for a change of weights that is not
    allowed, and A605 if PEFT omitted tensors.
    """
    from peft import PeftModel

    from ktc.adapters.own_weights import put_back

    adapter = read_adapter(folder)
    put_back(model)  # what an adapter that was unloaded has changed
    require_fit(adapter, model, str(model.name_or_path))
    with _loading(adapter, model, alone):
        attached = PeftModel.from_pretrained(model, str(folder), adapter_name=adapter_name, is_trainable=trainable)
        require_whole(adapter, attached, adapter_name)
    _tell_difference(folder, model)
    if not trainable:
        cast_as_trained(attached, adapter.kind)
    return attached


def attach_several(model: PreTrainedModel, folders: Mapping[str, Path], *, alone: bool = False) -> PeftModel:
    """Attach the adapters of `folders`, by PEFT's names of them, in place and in eval mode; the first is active.

    All of them are checked before any is attached. `alone` is for one of them, as in `attach`. Raise `InputRefused` as
    `attach` does.
    """
    adapters = {name: read_adapter(folder) for name, folder in folders.items()}
    for adapter in adapters.values():
        require_fit(adapter, model, str(model.name_or_path))
    kinds = sorted({adapter.kind for adapter in adapters.values()})
    if len(kinds) > 1:
        message = f"adapters of the kinds {listing(kinds, 9)} do not attach to one model: peft mixes none"
        raise InputRefused(Diagnostic("A604", message, hint="serve them one by one, or train all with LoRA"))
    first, *others = folders
    attached = attach(model, folders[first], adapter_name=first, alone=alone and not others)
    for name in others:
        _load_beside(attached, adapters[name], name)
    return attached


def attach_beside(attached: PeftModel, folder: Path, adapter_name: str) -> None:
    """Load the adapter in `folder` beside those that a model has. Raise `InputRefused` as `attach` does."""
    adapter, base = read_adapter(folder), cast("PreTrainedModel", attached.get_base_model())
    require_fit(adapter, base, str(base.name_or_path))
    _load_beside(attached, adapter, adapter_name)


def _load_beside(attached: PeftModel, adapter: Adapter, adapter_name: str) -> None:
    base = cast("PreTrainedModel", attached.get_base_model())
    with _loading(adapter, base, alone=False):
        attached.load_adapter(str(adapter.folder), adapter_name=adapter_name)
        require_whole(adapter, attached, adapter_name)
    _tell_difference(adapter.folder, attached)
    cast_as_trained(attached, adapter.kind)


def _tell_difference(folder: Path, model: nn.Module) -> None:
    """Log the warning (A612) that an adapter was trained beside other experts."""
    from ktc.model.loading.trained_beside import find_difference

    if different := find_difference(folder, model):
        log.warning("%s", render([different]))


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Put the modules under all adapters in place again, with their weights, also where attaching one failed."""
    from torch import nn

    from ktc.adapters.own_weights import put_back

    for name, module in list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules())):
        plain: Any = module
        while isinstance(inner := getattr(plain, "base_layer", getattr(plain, "original_module", None)), nn.Module):
            plain = inner
        parent, _, leaf = name.rpartition(".")
        if plain is not module and not {"base_layer", "original_module"} & set(parent.split(".")):
            setattr(model.get_submodule(parent), leaf, plain)
    vars(model).pop("peft_config", None)  # by which PEFT would take the next adapter for a second one
    put_back(model)
    return model


def require_finite(adapter: Adapter) -> None:
    """Raise `InputRefused` (A602) for a value that is not finite."""
    for name, tensor in read_tensors(adapter):
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise InputRefused(damaged(adapter.folder, f"`{name}` has a value that is not finite"))


@contextmanager
def _loading(adapter: Adapter, model: PreTrainedModel, alone: bool) -> Generator[None]:
    """Load an adapter in the context. Raise `InputRefused` (A603) where PEFT cannot, or would change the model."""
    from ktc.adapters.own_weights import unchanged

    name = adapter.folder.name
    try:
        with unchanged(read_tensors(adapter), model, name, alone=alone, config=adapter.config):
            yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, OSError, ImportError) as error:
        message = f"adapter `{name}` does not load on `{model.name_or_path}`: {_first_line(error)}"
        hint = exporting(adapter, model)
        hint = hint or "try whether peft loads it on the original model: `PeftModel.from_pretrained`"
        raise InputRefused(Diagnostic("A603", message, hint=hint)) from error


def require_whole(adapter: Adapter, attached: nn.Module, adapter_name: str = "default") -> None:
    """Raise `InputRefused` (A605) if the model does not hold the whole adapter, by what PEFT reports of its load."""
    from ktc.adapters.whole import find_loss

    if lost := find_loss(partial(read_tensors, adapter), attached, adapter_name):
        message = f"the installed peft does not load the whole of adapter `{adapter.folder.name}`: {lost}"
        hint = exporting(adapter, cast("Any", attached).get_base_model(), "--check")
        hint = hint or "compare its config with its file, or save it again with the peft that is installed"
        raise InputRefused(Diagnostic("A605", message, hint=hint))


def exporting(adapter: Adapter, model: PreTrainedModel, *options: str) -> str:
    """Return the hint to write another layout; "" where it has the same, or `ktc export` refuses."""
    from ktc.model.hf.conversions import adapted_one_by_one

    if adapter.kind != "LORA" or adapter.config.get("modules_to_save") or any(variants(adapter.config)):
        return ""
    if not any(".experts." in entry.name for entry in adapter.tensors):
        return ""  # the other layouts differ in the experts alone
    layout = other_layout(stacked=not adapted_one_by_one(model))
    command = shlex.join(["ktc", "export", str(adapter.folder), "--layout", layout, *options])
    return f"`{command}` writes a layout that the installed peft reads"


def read_tensors(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the adapter with its name in the file, one at a time, on the CPU."""
    from safetensors import safe_open

    with cast("Any", safe_open)(adapter.weights, framework="pt") as file:
        for entry in adapter.tensors:
            yield entry.name, file.get_tensor(entry.name)


# What does not fit a model


def _misfit(entry: TensorEntry, modules: Mapping[str, nn.Module], whole: bool) -> str:
    """Return the fault of one tensor of the adapter on these modules, "" if it is valid."""
    factor = split_name(entry.name)
    if factor is None:
        return ""  # not a factor: what PEFT makes of it is seen when it is loaded
    layer, side = factor[0].removesuffix(".base_layer"), factor[1]
    expert = _EXPERT.fullmatch(layer)
    module = modules.get(layer) or (modules.get(expert["experts"]) if expert else None)
    if module is None:
        return f"the model has no layer `{layer}`"
    outside, inside = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if whole and expert is None and isinstance(outside, int) and isinstance(inside, int):
        dim, wanted = (1, inside) if side == "lora_A" else (0, outside)
        if len(entry.shape) != 2 or entry.shape[dim] != wanted:
            return f"`{layer}` is {outside} x {inside} and its {side} is {' x '.join(map(str, entry.shape))}"
    return ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]
