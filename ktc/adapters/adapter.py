"""Adapter folders as PEFT saves them, and attaching one to a model.

In: a folder. Out: a frozen `Adapter`. Only headers are read until an adapter is attached. Refused: a missing adapter
(A601), a damaged or half-written one (A602), one of another model (A603), one that is not LoRA (A604), and one that
PEFT loads only in part (A605).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from ktc.checkpoint.header import HeaderRefused, TensorEntry, read_header
from ktc.decode import read_json
from ktc.diagnostics import Diagnostic, InputRefused, listing, render
from ktc.hf.lora_values import patterns_of, rank_fault, value_faults
from ktc.regular_files import read_regular
from ktc.timed_search import Invalid, TooMuchWork, search

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 4 << 20  # a list of every linear layer of the largest models has half of it
PREFIX = "base_model.model."
_PICKLE = "adapter_model.bin"
_PLAIN_NAME = re.compile(r"[\w.-]*")
_FLAGS = re.compile(r"((?:\(\?[aiLmsux]+\))*)(.*)", re.DOTALL)  # such as `(?i)`, which come first
_FACTOR = re.compile(r"(?P<module>.+?)\.(?P<side>lora_A|lora_B)(\.weight)?")
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter on disk. `config` is the whole of its adapter_config.json; `base` the model it names, or ""."""

    folder: Path
    base: str
    config: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]  # names as in the file, shapes, dtypes; by the order of their bytes

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def r(self) -> int:
        return int(self.config["r"])

    @property
    def lora_alpha(self) -> float:
        return float(self.config["lora_alpha"])


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in `folder`. Raise `InputRefused` (A601, A602, A604) with all faults."""
    if not (folder / CONFIG).is_file() and not (folder / WEIGHTS).is_file():
        raise InputRefused(_no_adapter(folder))
    problems: list[Diagnostic] = []
    config = _read_config(folder, problems)
    tensors = _read_tensors(folder, problems)
    if config is not None:
        problems += _config_faults(folder, config)
    if config is not None and not problems:
        problems += _tensor_faults(folder, config, tensors)
    if problems or config is None:
        raise InputRefused(*problems)
    return Adapter(folder, str(config.get("base_model_name_or_path") or ""), config, tensors)


def require_base(adapter: Adapter, model_name: str) -> None:
    """Raise `InputRefused` (A603) if the adapter names another model. Folders are compared by their last name."""
    if adapter.base and PurePath(adapter.base).name != PurePath(model_name).name:
        message = f"adapter `{adapter.folder.name}` is of `{adapter.base}`, not of `{model_name}`"
        hint = f"if that is the same model, name it in `base_model_name_or_path` of `{adapter.folder / CONFIG}`"
        raise InputRefused(Diagnostic("A603", message, hint=hint))


def require_fit(adapter: Adapter, model: nn.Module, model_name: str) -> None:
    """Raise `InputRefused` (A603) if the model lacks a layer of the adapter, or has it in another size."""
    require_base(adapter, model_name)
    modules = {str(name): module for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())}
    require_quick_patterns(adapter, list(modules))
    wrong = [fault for entry in adapter.tensors if (fault := _misfit(entry, modules))]
    if wrong:
        whose = f"of `{adapter.base}`" if adapter.base else "without a base"
        message = f"adapter `{adapter.folder.name}` {whose} does not fit `{model_name}`: {wrong[0]}"
        more = f" ({len(wrong) - 1} more tensors do not fit)" if len(wrong) > 1 else ""
        raise InputRefused(Diagnostic("A603", message + more, hint="use the model that the adapter was trained on"))


def require_quick_patterns(adapter: Adapter, names: Sequence[str]) -> None:
    """Raise `InputRefused` (A602) for a regular expression that PEFT could not finish on these names of modules."""
    patterns = [each for each in patterns_of(adapter.config) if not _PLAIN_NAME.fullmatch(each)]
    if not patterns:
        return
    split = [cast("re.Match[str]", _FLAGS.match(pattern)) for pattern in patterns]
    try:
        found = search([f"{each[1]}^(.*\\.)?({each[2]})$" for each in split], names)
    except TooMuchWork as error:
        message = f"the pattern `{patterns[error.index]:.100}` of `{CONFIG}` cannot be searched: {error}"
        raise InputRefused(_damaged(adapter.folder, message)) from error
    for pattern, names_found in zip(patterns, found, strict=True):
        if isinstance(names_found, Invalid):
            message = f"the pattern `{pattern:.100}` of `{CONFIG}` is invalid: {names_found.reason}"
            raise InputRefused(_damaged(adapter.folder, message))


def attach(
    model: PreTrainedModel, folder: Path, *, trainable: bool = False, adapter_name: str = "default"
) -> PeftModel:
    """Attach the adapter in `folder` to a loaded model, compiled or stock, by stock PEFT, in place and in eval mode.

    One that is not trainable gets the model's dtype. So a bf16 model computes it as under the autocast of its training,
    and not in fp32, which would differ from what was trained. Factors that are merged before the sum is rounded stay
    in fp32, as they were merged in training.

    Raise `InputRefused`: the errors of `read_adapter` and `require_fit`, and A605 if PEFT omitted tensors.
    """
    from peft import PeftModel

    adapter = read_adapter(folder)
    require_fit(adapter, model, str(model.name_or_path))
    with _refusing_misfits(folder, model):
        attached = PeftModel.from_pretrained(model, str(folder), adapter_name=adapter_name, is_trainable=trainable)
    require_whole(adapter, attached, adapter_name)
    _tell_difference(folder, model)
    if not trainable:
        _cast_to_model(attached)
    return attached


def attach_several(model: PreTrainedModel, folders: Mapping[str, Path]) -> PeftModel:
    """Attach the adapters of `folders`, by PEFT's names of them, in place and in eval mode; the first is active.

    All of them are checked before any is attached. Raise `InputRefused` as `attach` does.
    """
    adapters = {name: read_adapter(folder) for name, folder in folders.items()}
    for adapter in adapters.values():
        require_fit(adapter, model, str(model.name_or_path))
    first, *others = folders
    attached = attach(model, folders[first], adapter_name=first)
    for name in others:
        _load_beside(attached, adapters[name], name)
    return attached


def attach_beside(attached: PeftModel, folder: Path, adapter_name: str) -> None:
    """Load the adapter in `folder` beside those that a model has. Raise `InputRefused` as `attach` does."""
    adapter, base = read_adapter(folder), cast("PreTrainedModel", attached.get_base_model())
    require_fit(adapter, base, str(base.name_or_path))
    _load_beside(attached, adapter, adapter_name)


def _load_beside(attached: PeftModel, adapter: Adapter, adapter_name: str) -> None:
    with _refusing_misfits(adapter.folder, cast("PreTrainedModel", attached.get_base_model())):
        attached.load_adapter(str(adapter.folder), adapter_name=adapter_name)
    require_whole(adapter, attached, adapter_name)
    _tell_difference(adapter.folder, attached)
    _cast_to_model(attached)


def _tell_difference(folder: Path, model: nn.Module) -> None:
    """Log the warning (A612) that an adapter was trained beside other experts."""
    from ktc.model.trained_beside import find_difference

    if different := find_difference(folder, model):
        log.warning("%s", render([different]))


def _cast_to_model(attached: PeftModel) -> None:
    """Give the factors of all adapters the model's dtype, but for those that are merged before they are rounded."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    from ktc.experts.module import FusedMoe
    from ktc.linears.trained_linear import TrainedLinear

    dtype = cast("Any", attached).dtype
    for module in cast("Iterable[nn.Module]", attached.modules()):
        if not isinstance(module, BaseTunerLayer):
            continue
        layer: Any = module.get_base_layer()
        if isinstance(layer, FusedMoe) and layer.weights.training.merged:
            continue
        if isinstance(layer, TrainedLinear) and layer.weight_training.merged:
            continue
        for factors in (getattr(module, "lora_A", None), getattr(module, "lora_B", None)):
            if isinstance(factors, nn.ModuleDict):
                factors.to(dtype)


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Put the modules under all adapters in their places again, also where attaching one failed halfway."""
    from torch import nn

    for name, module in list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules())):
        plain: Any = module
        while isinstance(inner := getattr(plain, "base_layer", getattr(plain, "original_module", None)), nn.Module):
            plain = inner
        parent, _, leaf = name.rpartition(".")
        if plain is not module and not {"base_layer", "original_module"} & set(parent.split(".")):
            setattr(model.get_submodule(parent), leaf, plain)
    vars(model).pop("peft_config", None)  # by which PEFT would take the next adapter for a second one
    return model


def require_finite(adapter: Adapter) -> None:
    """Raise `InputRefused` (A602) for a value that is not finite."""
    for name, tensor in read_tensors(adapter):
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise InputRefused(_damaged(adapter.folder, f"`{name}` has a value that is not finite"))


@contextmanager
def _refusing_misfits(folder: Path, model: PreTrainedModel) -> Generator[None]:
    """Raise InputRefused (A603) where PEFT cannot load an adapter."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        message = f"adapter `{folder.name}` does not load on `{model.name_or_path}`: {_first_line(error)}"
        hint = f"`ktc export {folder} --layout per-expert` writes a layout that the installed peft reads"
        raise InputRefused(Diagnostic("A603", message, hint=hint)) from error


def require_whole(adapter: Adapter, attached: nn.Module, adapter_name: str = "default") -> None:
    """Raise `InputRefused` (A605) if the model does not hold the whole adapter.

    Every layout of one adapter has the same sum of squares: PEFT only permutes its values and adds zeros.
    """
    marks = (f".lora_A.{adapter_name}.", f".lora_B.{adapter_name}.")
    held = _squares(p for name, p in attached.named_parameters() if any(mark in f"{name}." for mark in marks))
    wanted = _squares(tensor for name, tensor in read_tensors(adapter) if split_name(name) is not None)
    whole = _squares(p for name, p in attached.named_parameters() if f".modules_to_save.{adapter_name}." in name)
    saved = _squares(tensor for name, tensor in read_tensors(adapter) if split_name(name) is None)
    partly = not math.isclose(held, wanted, rel_tol=1e-3, abs_tol=1e-12)
    if partly or not math.isclose(whole, saved, rel_tol=1e-2, abs_tol=1e-12):
        message = f"peft took a part of adapter `{adapter.folder.name}` only, without saying so"
        hint = f"`ktc export {adapter.folder} --check` writes a layout that the installed peft reads whole"
        raise InputRefused(Diagnostic("A605", message, hint=hint))


def read_tensors(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the adapter with its name in the file, one at a time, on the CPU."""
    from safetensors import safe_open

    with cast("Any", safe_open)(adapter.weights, framework="pt") as file:
        for entry in adapter.tensors:
            yield entry.name, file.get_tensor(entry.name)


def split_name(name: str) -> tuple[str, str] | None:
    """(layer, "lora_A" or "lora_B") of a tensor of an adapter; the layer may end in `.base_layer`. None: no factor."""
    found = _FACTOR.fullmatch(name.removeprefix(PREFIX))
    return (found["module"], found["side"]) if found else None


# Faults of a folder


def _no_adapter(folder: Path) -> Diagnostic:
    if (folder / _PICKLE).is_file():
        return _damaged(folder, f"`{_PICKLE}` is a pickle, which is not read, and there is no `{WEIGHTS}`")
    message = f"`{folder}` is not an adapter: no `{CONFIG}`" if folder.exists() else f"there is no folder `{folder}`"
    return Diagnostic("A601", message, hint="name the folder that `save_pretrained` of a `PeftModel` wrote")


def _damaged(folder: Path, what: str) -> Diagnostic:
    hint = "save the adapter again, or use an earlier checkpoint of the run"
    return Diagnostic("A602", f"adapter `{folder}` is damaged or half written: {what}", hint=hint)


def _read_config(folder: Path, problems: list[Diagnostic]) -> Mapping[str, Any] | None:
    try:
        content: object = read_json(read_regular(folder / CONFIG, _MOST_CONFIG_BYTES))
    except FileNotFoundError:
        problems.append(_damaged(folder, f"it has no `{CONFIG}`"))
    except (OSError, ValueError) as error:
        problems.append(_damaged(folder, f"`{CONFIG}`: {error}"))
    else:
        if isinstance(content, dict):
            return cast("Mapping[str, Any]", content)
        problems.append(_damaged(folder, f"`{CONFIG}` holds no JSON object"))
    return None


def _read_tensors(folder: Path, problems: list[Diagnostic]) -> tuple[TensorEntry, ...]:
    try:
        return read_header(folder / WEIGHTS)
    except FileNotFoundError:
        pickled = f"; `{_PICKLE}` is a pickle, which is not read" if (folder / _PICKLE).is_file() else ""
        problems.append(_damaged(folder, f"it has no `{WEIGHTS}`{pickled}"))
    except HeaderRefused as refusal:
        problems += [_damaged(folder, diagnostic.message) for diagnostic in refusal.diagnostics]
    except OSError as error:
        problems.append(_damaged(folder, f"`{WEIGHTS}`: {error.strerror}"))
    return ()


def _config_faults(folder: Path, config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Yield the faults of a config that is not LoRA, or has values that LoRA cannot have."""
    if config.get("peft_type") != "LORA":
        message = f"adapter `{folder}` is of kind `{config.get('peft_type')}`; ktc reads LoRA adapters"
        yield Diagnostic("A604", message, hint="train with `LoraConfig`")
        return
    for fault in value_faults(config):
        yield _damaged(folder, f"`{CONFIG}`: {fault}")


def _tensor_faults(folder: Path, config: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> Iterator[Diagnostic]:
    """Factors without their other half or of another rank, and files without any."""
    if not tensors:
        yield _damaged(folder, f"`{WEIGHTS}` holds no tensors")
    sides: dict[str, set[str]] = {}
    factors: list[TensorEntry] = []
    for entry in tensors:
        if (found := split_name(entry.name)) is not None:
            sides.setdefault(found[0], set()).add(found[1])
            factors.append(entry)
    alone = [layer for layer, found in sides.items() if len(found) == 1]
    if alone:
        yield _damaged(folder, f"these layers have one factor of two: {listing(alone, 3)}")
    if factors and (fault := rank_fault(config, factors)):
        yield _damaged(folder, fault)


# What does not fit a model


def _misfit(entry: TensorEntry, modules: Mapping[str, nn.Module]) -> str:
    """Return the fault of one tensor of the adapter on these modules, "" if it is valid."""
    found = split_name(entry.name)
    if found is None:
        return ""  # not a factor: what PEFT makes of it is seen when it is loaded
    layer, side = found[0].removesuffix(".base_layer"), found[1]
    expert = _EXPERT.fullmatch(layer)
    module = modules.get(layer) or (modules.get(expert["experts"]) if expert else None)
    if module is None:
        return f"the model has no layer `{layer}`"
    outside, inside = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if expert is None and isinstance(outside, int) and isinstance(inside, int):
        dim, wanted = (1, inside) if side == "lora_A" else (0, outside)
        if len(entry.shape) != 2 or entry.shape[dim] != wanted:
            return f"`{layer}` is {outside} x {inside} and its {side} is {' x '.join(map(str, entry.shape))}"
    return ""


def _squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.detach().double().square().sum()) for tensor in tensors)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]
