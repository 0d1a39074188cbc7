"""The record of the weights beside which an adapter was trained, and its comparison with a loaded model.

An adapter that was trained beside INT4 experts is another function beside bf16 ones, and PEFT's files do not record it.
In: a model that ktc has loaded. Out: `adapter_ktc.json` in the adapter's folder, and a warning (A612) where another
model's experts have other values. Adapters without the record, as stock PEFT saves them, are not compared. Linear
layers are not compared either: those of a quantised checkpoint have the bf16 values of its codes. The record also names
the modules that training rounded, so that a merge rounds the same ones.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import Undecodable, decode, read_json
from ktc.foundation.files import write_file
from ktc.foundation.text_files import read_text
from ktc.model.checkpoint.int4 import WHOLE_ROW, Int4Grid
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.weight_training import WeightTraining
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.trained_linear import TrainedLinear

RECORD = "adapter_ktc.json"
_VALUES = ("bf16", "fp16", "fp32")
STORED = " as stored"
MERGED, TRAINED = ", merged with the adapter", ", trained"
_WRAPPERS = ("base_layer", "original_module")  # of PEFT, around the module that it is put on
_LARGEST = 1 << 20  # bytes of a record


@dataclass(frozen=True, slots=True)
class TrainedBeside:
    """`experts`: the weights of routed experts in words, sorted and without repetitions.

    `rounded`: by the FQN of a module of the original, the grid to which its weights were rounded, in the same words.
    """

    experts: tuple[str, ...]
    rounded: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, model: nn.Module) -> TrainedBeside:
        """Return the record of a model, under an adapter or not."""
        modules = dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))
        experts = {_in_words(module) for module in modules.values() if isinstance(module, FusedMoe)}
        rounded = {_of_original(fqn): words for fqn, module in modules.items() if (words := _rounded(module))}
        return cls(tuple(sorted(experts)), rounded)


def write_record(folder: Path, model: nn.Module) -> None:
    """Write the record of `model` into an adapter's folder. Raises OSError."""
    write_file(folder / RECORD, json.dumps(asdict(TrainedBeside.of(model)), indent=1) + "\n")


def rounded_modules(folder: Path) -> Mapping[str, str] | None:
    """Return the grids of the modules that were rounded in training, by FQN; `None` without a record of them.

    Raises InputRefused (A602) for a damaged record.
    """
    return _read(folder / RECORD)[1] if os.path.lexists(folder / RECORD) else None


def copy_record(source: Path, folder: Path) -> None:
    """Copy the record of the adapter in `source`, if it has one, into a folder that is being made. Raises OSError."""
    if (source / RECORD).is_file():
        shutil.copyfile(source / RECORD, folder / RECORD)


def find_difference(folder: Path, model: nn.Module) -> Diagnostic | None:
    """Return the warning (A612) that the adapter in `folder` was trained beside other experts than those of `model`.

    Raises InputRefused (A602) for a damaged record.
    """
    if not os.path.lexists(folder / RECORD):
        return None
    trained, present = _read(folder / RECORD)[0], TrainedBeside.of(model)
    if len(trained.experts) == len(present.experts) and all(map(_same, trained.experts, present.experts)):
        return None
    beside, here = (" and ".join(record.experts) or "no fused experts" for record in (trained, present))
    message = f"adapter `{folder.name}` was trained beside experts in {beside}, and these are in {here}"
    hint = "its answers differ from those in training; `ktc consistency` measures how much"
    return Diagnostic("A612", message, hint=hint, severity="warning")


def _read(path: Path) -> tuple[TrainedBeside, Mapping[str, str] | None]:
    """Return the record, and its rounded modules: `None` in one of a version that did not write them."""
    try:
        content = read_json(read_text(path, unreadable="A602", not_utf8="A602", most_bytes=_LARGEST))
        if isinstance(content, dict) and "rounded" not in content:
            return decode({**cast("dict[str, object]", content), "rounded": {}}, TrainedBeside), None
        record = decode(content, TrainedBeside)
        return record, record.rounded
    except (Undecodable, ValueError) as error:
        message = f"`{path}` is damaged: {error}"
        raise InputRefused(Diagnostic("A602", message, hint="copy the adapter again")) from error


def _same(one: str, other: str) -> bool:
    """Compare formats. Codes with a scale per row are stored in groups of the kernel's choice."""
    if one.endswith(STORED) == other.endswith(STORED):
        return one == other
    grid, stored = (other, one) if one.endswith(STORED) else (one, other)
    return grid in (stored.removesuffix(STORED), str(Int4Grid(WHOLE_ROW)))


def _in_words(experts: FusedMoe) -> str:
    """Name the format of packed codes, or the grid that other weights are rounded to, as `Int4Grid` writes it."""
    weights, training = experts.weights, experts.weights.training
    name, group = ("", 0) if weights.packed is None else weights.packed.stored("up")
    if training.grid is not None:
        name = str(training.grid)
    elif name == "int4":
        name = f"{Int4Grid(group)}{STORED}"
    elif name in _VALUES or not name:
        name = "full precision"
    return name + _how(training)


def _how(training: WeightTraining) -> str:
    return MERGED if training.merged else TRAINED if training.trains else ""


def _rounded(module: nn.Module) -> str:
    """Return the grid of the module's weights in words, "" where they are not rounded."""
    if isinstance(module, FusedMoe) and module.weights.training.grid is not None:
        return _in_words(module)
    if isinstance(module, FusedLinear) and module.grid is not None:
        return str(module.grid)
    if isinstance(module, TrainedLinear) and module.weight_training.grid is not None:
        return f"{module.weight_training.grid}{_how(module.weight_training)}"
    return ""


def _of_original(fqn: str) -> str:
    """Return the FQN in the original of a module that PEFT has wrapped, or of the copy that trains."""
    parts = iter(fqn.removeprefix("base_model.model.").split("."))
    kept: list[str] = []
    for part in parts:
        if part == "modules_to_save":
            next(parts, None)  # the adapter's name
        elif part not in _WRAPPERS:
            kept.append(part)
    return ".".join(kept)
