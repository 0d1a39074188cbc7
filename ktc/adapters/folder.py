"""The files of an adapter's folder: their names, their headers and their faults.

In: a folder. Out: the JSON object, the entries of the tensors, and `Diagnostic`s: A601, A602, A604. No values are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from ktc.adapters import kinds
from ktc.diagnostics import Diagnostic, listing
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint.header import HeaderRefused, TensorEntry, read_header
from ktc.model.hf import lora_values
from ktc.model.hf.lora_values import is_factor, rank_fault, value_faults

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
_MOST_CONFIG_BYTES: Final = 4 << 20  # a list of every linear layer of the largest models has half of it
_PICKLE: Final = "adapter_model.bin"
_FACTOR: Final = re.compile(r"(?P<module>.+?)\.(?P<side>lora_A|lora_B)(\.weight)?")


def split_name(name: str) -> tuple[str, str] | None:
    """Return the layer and `lora_A` or `lora_B` of an adapter's tensor, None if it is not a factor.

    The layer may end in `.base_layer`.
    """
    factor = _FACTOR.fullmatch(name.removeprefix(PREFIX))
    return (factor["module"], factor["side"]) if factor else None


def no_adapter(folder: Path) -> Diagnostic:
    """Return the diagnostic (A601, A602) of a folder without the two files."""
    if (folder / _PICKLE).is_file():
        return damaged(folder, f"`{_PICKLE}` is a pickle, which is not read, and there is no `{WEIGHTS}`")
    message = f"`{folder}` is not an adapter: no `{CONFIG}`" if folder.exists() else f"there is no folder `{folder}`"
    return Diagnostic("A601", message, hint="name the folder that `save_pretrained` of a `PeftModel` wrote")


def no_original(folder: Path, option: str = "") -> Diagnostic:
    """Return the diagnostic (A603) of a folder that is not a model, which `option` names, if not an argument."""
    message = f"`{folder}` is neither a compiled model nor a checkpoint: it has no `config.json`"
    if not option and (folder / CONFIG).is_file():
        return Diagnostic("A603", f"`{folder}` is an adapter", hint="name its model first: `ktc merge MODEL ADAPTER`")
    return Diagnostic("A603", message, hint=f"name the folder of the original{f' with `{option}`' if option else ''}")


def damaged(folder: Path, what: str) -> Diagnostic:
    """Return the diagnostic (A602) of a folder that is wrong in itself."""
    hint = "save the adapter again, or use an earlier checkpoint of the run"
    return Diagnostic("A602", f"adapter `{folder}` is damaged or half written: {what}", hint=hint)


def read_config(folder: Path, problems: list[Diagnostic]) -> Mapping[str, Any] | None:
    """Return the config as a JSON object; its faults are appended to `problems`."""
    try:
        content: object = read_json(read_regular(folder / CONFIG, _MOST_CONFIG_BYTES))
    except FileNotFoundError:
        problems.append(damaged(folder, f"it has no `{CONFIG}`"))
    except (OSError, ValueError) as error:
        problems.append(damaged(folder, f"`{CONFIG}`: {error}"))
    else:
        if isinstance(content, dict):
            return cast("Mapping[str, Any]", content)
        problems.append(damaged(folder, f"`{CONFIG}` holds no JSON object"))
    return None


def read_entries(folder: Path, problems: list[Diagnostic]) -> tuple[TensorEntry, ...]:
    """Return the tensors by their header; its faults are appended to `problems`."""
    try:
        return read_header(folder / WEIGHTS)
    except FileNotFoundError:
        pickled = f"; `{_PICKLE}` is a pickle, which is not read" if (folder / _PICKLE).is_file() else ""
        problems.append(damaged(folder, f"it has no `{WEIGHTS}`{pickled}"))
    except HeaderRefused as refusal:
        problems += [damaged(folder, diagnostic.message) for diagnostic in refusal.diagnostics]
    except OSError as error:
        problems.append(damaged(folder, f"`{WEIGHTS}`: {error.strerror}"))
    return ()


def config_faults(folder: Path, config: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> Iterator[Diagnostic]:
    """Yield the faults of a config that does not attach, or has values that no adapter can have."""
    kind = config.get("peft_type")
    if reason := kinds.reason_against(kind, tensors) or lora_values.reason_against(config):
        message = f"adapter `{folder}` of kind `{kind!s:.40}` does not attach to a compiled model: {reason}"
        yield Diagnostic("A604", message, hint="train with `LoraConfig`")
        return
    for fault in value_faults(config) if kind == "LORA" else kinds.value_faults(config, tensors):
        yield damaged(folder, f"`{CONFIG}`: {fault}")


def tensor_faults(folder: Path, config: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> Iterator[Diagnostic]:
    """Yield the faults of factors without their other half or of another rank, and of files without any."""
    if not tensors:
        yield damaged(folder, f"`{WEIGHTS}` holds no tensors")
    sides: dict[str, set[str]] = {}
    for entry in tensors:
        if (factor := split_name(entry.name)) is not None:
            sides.setdefault(factor[0], set()).add(factor[1])
    alone = [layer for layer, names in sides.items() if len(names) == 1]
    if alone:
        yield damaged(folder, f"these layers have one factor of two: {listing(alone, 3)}")
    if config["peft_type"] == "LORA" and (fault := rank_fault(config, [e for e in tensors if is_factor(e.name)])):
        yield damaged(folder, fault)
