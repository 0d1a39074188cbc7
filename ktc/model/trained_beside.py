"""The record beside an adapter of the experts that it was trained beside, and its comparison with a loaded model.

An adapter that was trained beside INT4 experts is another function beside bf16 ones, and nothing in PEFT's files says
so. In: a model that ktc has loaded. Out: `adapter_ktc.json` in the adapter's folder, and a warning (A612) where another
model's experts have other values. Adapters without the record, as stock PEFT saves them, are not compared. Linear
layers are not either: those of a quantised checkpoint are held as the bf16 values of its codes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from torch import nn

from ktc.checkpoint.int4 import WHOLE_ROW, Int4Grid
from ktc.decode import Undecodable, decode, read_json
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.experts.module import FusedMoe
from ktc.files import write_file
from ktc.text_files import read_text

RECORD = "adapter_ktc.json"
_VALUES = ("bf16", "fp16", "fp32")
_STORED = " as stored"
_LARGEST = 1 << 20  # bytes of a record


@dataclass(frozen=True, slots=True)
class TrainedBeside:
    """`experts`: the weights of routed experts in words, sorted and without repetitions."""

    experts: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> TrainedBeside:
        """Return the record of a model, under an adapter or not."""
        modules = cast("Iterable[nn.Module]", model.modules())
        return cls(tuple(sorted({_in_words(each) for each in modules if isinstance(each, FusedMoe)})))


def write_record(folder: Path, model: nn.Module) -> None:
    """Record in an adapter's folder what `model` is. Raises OSError."""
    write_file(folder / RECORD, json.dumps(asdict(TrainedBeside.of(model)), indent=1) + "\n")


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
    trained, found = _read(folder / RECORD), TrainedBeside.of(model)
    if len(trained.experts) == len(found.experts) and all(map(_same, trained.experts, found.experts)):
        return None
    beside, here = (" and ".join(each.experts) or "no fused experts" for each in (trained, found))
    message = f"adapter `{folder.name}` was trained beside experts in {beside}, and these are in {here}"
    hint = "its answers differ from those in training; `ktc consistency` measures how much"
    return Diagnostic("A612", message, hint=hint, severity="warning")


def _read(path: Path) -> TrainedBeside:
    try:
        return decode(
            read_json(read_text(path, unreadable="A602", not_utf8="A602", most_bytes=_LARGEST)), TrainedBeside
        )
    except (Undecodable, ValueError) as error:
        message = f"`{path}` is damaged: {error}"
        raise InputRefused(Diagnostic("A602", message, hint="copy the adapter again")) from error


def _same(one: str, other: str) -> bool:
    """Compare formats. Codes with a scale per row are stored in groups of the kernel's choice."""
    if one.endswith(_STORED) == other.endswith(_STORED):
        return one == other
    grid, stored = (other, one) if one.endswith(_STORED) else (one, other)
    return grid in (stored.removesuffix(_STORED), str(Int4Grid(WHOLE_ROW)))


def _in_words(experts: FusedMoe) -> str:
    """Name the format of packed codes, or the grid that other weights are rounded to, as `Int4Grid` writes it."""
    weights, training = experts.weights, experts.weights.training
    name, group = ("", 0) if weights.packed is None else weights.packed.stored("up")
    if training.grid is not None:
        name = str(training.grid)
    elif name == "int4":
        name = f"{Int4Grid(group)}{_STORED}"
    elif name in _VALUES or not name:
        name = "full precision"
    how = ", merged with the adapter" if training.merged else ", trained" if training.trains else ""
    return name + how
