"""`ktc export`: an adapter in another layout, as a PEFT folder or a GGUF file.

In: an adapter folder or a GGUF adapter, its original model, a layout. Out: the written adapter and its changes.
The factors are the same in every layout; only the zeros and alphas of a layout are computed. Refused: the errors of
reading, placing and the layouts (A601 to A607), and an existing target (A609).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ktc.adapters import adapter as folders
from ktc.adapters.adapter import read_adapter, require_lora
from ktc.adapters.base_model import BaseModel, find_base, read_base
from ktc.adapters.factors import FactorReader, Factors
from ktc.adapters.gguf import read_gguf_adapter, write_gguf
from ktc.adapters.layouts import place
from ktc.adapters.peft_layouts import written
from ktc.adapters.save import require_new, save_adapter
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.files import new_folder, refusing, replaced_file
from ktc.model.checkpoint.adapter_uses import MERGED, other_layout, stored_as
from ktc.model.checkpoint.index import open_index
from ktc.model.hf.conversions import adapted_one_by_one
from ktc.model.loading.trained_beside import copy_record

ExportLayout = Literal["per-expert", "peft-fused", "peft-fused-018", "gguf"]


@dataclass(frozen=True, slots=True)
class Opened:
    """An adapter of any layout; `layout` is that of its experts, in words where it has none."""

    path: Path
    base: BaseModel
    layout: str
    config: Mapping[str, Any]
    factors: tuple[Factors, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """A written adapter; `tensors` and `bytes` are those of the file of weights."""

    path: Path
    found: str  # the layout that was read
    layout: ExportLayout
    weights: int  # adapted weights of the model, a stack of experts as one
    tensors: int
    bytes: int
    notes: tuple[str, ...]


def export(
    source: Path, layout: ExportLayout, out: Path | None = None, model: Path | None = None, *, force: bool = False
) -> Exported:
    """Write the adapter `source` in `layout` to `out`; `model` is its original, if it does not name it.

    `force` permits the replacement of an adapter at `out`.
    """
    opened = open_adapter(source, model)
    named = source if source.name not in ("", "..") else source.resolve()  # `.` has no name to add to
    stem = named.name.removesuffix(".gguf")
    path = out or named.with_name(f"{stem}-lora.gguf" if layout == "gguf" else f"{stem}-{layout}")
    require_new(path, force, (source, model))
    if layout == "gguf":
        with refusing(path), replaced_file(path) as draft:
            count, notes = write_gguf(opened.factors, opened.base, draft, *_other_ways(opened, model)), ()
            size = draft.stat().st_size
    else:
        content = written(opened.config, opened.factors, opened.base, layout)
        with refusing(path), new_folder(path, replaces=force) as draft:
            save_adapter(draft, content.config, content.tensors)
            copy_record(source, draft)
            size = (draft / folders.WEIGHTS).stat().st_size
        count, notes = len(content.tensors), content.notes
    return Exported(path, opened.layout, layout, len(opened.factors), count, size, notes)


def _other_ways(opened: Opened, model: Path | None) -> tuple[str, str]:
    """Return the hints for an adapter without a place in GGUF files: its model merged, and another layout."""

    def command(*options: str) -> str:
        named = [] if model is None else ["--model", str(model)]
        return f"`{shlex.join(['ktc', 'export', str(opened.path), *options, *named])}`"

    merged = f"{command(*MERGED)} writes the model with the adapter merged; or train without these layers"
    if stored_as(open_index(opened.base.folder)) == "a GGUF file":
        merged = "train without these layers: the original is a GGUF file, into which nothing is merged"
    has_experts = any(factors.target.experts for factors in opened.factors)
    layout = other_layout(stacked=has_experts and not adapted_one_by_one(opened.base.model))
    return merged, f"{command('--layout', layout)} writes it for other tools"


def open_adapter(source: Path, model: Path | None = None) -> Opened:
    """Return the factors of an adapter folder or a GGUF adapter; the latter needs `model`. Raise `InputRefused`."""
    if source.suffix == ".gguf" and source.is_file():
        if model is None:
            message = f"`{source.name}` does not say which model it is of"
            raise InputRefused(Diagnostic("A603", message, hint="name the original with `--model FOLDER`"))
        base = read_base(model)
        return Opened(source, base, "gguf", {"base_model_name_or_path": base.name}, read_gguf_adapter(source, base))
    adapter = require_lora(read_adapter(source))
    base = find_base(adapter, model)
    placed = place(adapter, base)
    if placed.whole:
        message = f"adapter `{adapter.folder.name}` has modules that were trained whole, as `{placed.whole[0].name}`"
        merge = shlex.join(["ktc", "merge", str(base.folder), str(source), "-o", f"{source.resolve().name}-merged"])
        hint = f"use it with peft as it is, or merge it: `{merge}`"
        raise InputRefused(Diagnostic("A604", message, hint=hint))
    with FactorReader(adapter.weights) as reader:
        factors = tuple(reader.read(weight) for weight in placed.placed)
    return Opened(source, base, placed.layout or "no routed experts", adapter.config, factors)
