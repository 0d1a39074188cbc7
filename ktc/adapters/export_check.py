"""`ktc export --check`: compare an exported adapter in stock peft, in a process without ktc, with its source.

In: the source and the exported adapter. Out: a `Checked` with the difference of logits. The model is a twin of the
original's config with random weights, small enough for every machine. Factors are cut to its sizes; the config is the
exported one. The reference is the twin with the source's factors added to its weights. A GGUF file is read back and
its factors are compared. Refused: a layout that the installed peft does not read (A608).
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ktc.adapters.base_model import BaseModel, Target, linears_of, targets_of
from ktc.adapters.export import Exported, Opened, open_adapter
from ktc.adapters.factors import Factors, Layout
from ktc.adapters.layouts import SWAPPED_SINCE
from ktc.adapters.peft_layouts import written
from ktc.adapters.save import save_adapter
from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import versions
from ktc.foundation.files import temporary_folder
from ktc.model import twin
from ktc.model.hf.stock_loading import no_progress_bars

_PROGRAM = Path(__file__).with_name("stock_logits.py")
_SMALL = 20_000_000  # parameters; a model of no more is its own twin
_SEED = 20
_OF_EFFECT, _OF_LOGITS = 1e-4, 3e-6  # differences that fp32 may make, of the adapter's effect and of the logits


@dataclass(frozen=True, slots=True)
class Checked:
    """`relative` is the largest difference of logits (of factors, for GGUF) by the largest effect of the adapter."""

    passed: bool
    relative: float
    difference: float
    effect: float
    peft: str  # the release that read it, "" for GGUF
    weights: int  # adapted weights that the twin has too
    found: str  # the fault in words


def check(source: Path, exported: Exported, model: Path | None = None, python: str = sys.executable) -> Checked:
    """Compare the exported adapter with its source; `python` is the interpreter with the peft that reads it.

    Raises `HostLacks` (A608) where that peft reads another layout, and what `open_adapter` raises.
    """
    wanted = open_adapter(source, model)
    exported_adapter = open_adapter(exported.path, model or wanted.base.folder)
    if exported.layout == "gguf":
        return _compared(wanted.factors, exported_adapter.factors)
    if python == sys.executable:
        _require_reading(exported, exported_adapter)
    with temporary_folder("check") as folder, no_progress_bars():
        return _in_stock_peft(wanted, exported_adapter, exported.layout, folder, python)


def _require_reading(exported: Exported, opened: Opened) -> None:
    installed = versions.release(versions.installed("peft") or "0")
    swaps = any(factors.target.experts and not factors.target.transposed for factors in opened.factors)
    reads = (installed >= SWAPPED_SINCE) == (exported.layout != "peft-fused-018")
    if swaps and not reads:
        message = f"peft {versions.dotted(installed)} is installed, which does not read the layout `{exported.layout}`"
        wanted = "before 0.19" if exported.layout == "peft-fused-018" else "0.19 or newer"
        raise HostLacks(Diagnostic("A608", message, hint=f"check it where peft {wanted} is installed"))


# In stock peft


def _in_stock_peft(wanted: Opened, exported: Opened, layout: Layout, folder: Path, python: str) -> Checked:
    small = _twin(wanted.base)
    targets = targets_of(small)
    kept = [cut for factors in wanted.factors if (cut := _cut(factors, targets))]
    of_export = [cut for factors in exported.factors if (cut := _cut(factors, targets))]
    small.save_pretrained(folder / "base")
    _add(small, kept)
    small.save_pretrained(folder / "merged")
    base = replace(wanted.base, model=small, targets=targets, linears=linears_of(small))
    tensors = written(exported.config, of_export, base, layout).tensors
    (folder / "adapter").mkdir()
    save_adapter(folder / "adapter", exported.config, tensors)
    squares = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
    parts = [python, "-I", str(_PROGRAM), *(str(folder / name) for name in ("base", "merged", "adapter"))]
    done = subprocess.run(parts, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return Checked(False, math.inf, math.inf, 0.0, "", len(kept), f"stock peft fails: {_last_line(done.stderr)}")
    return _judged(json.loads(done.stdout.splitlines()[-1]), squares, len(kept))


def _judged(result: Mapping[str, Any], squares: float, weights: int) -> Checked:
    difference, effect, scale = (float(result[name]) for name in ("difference", "effect", "scale"))
    fault = ""
    if not math.isclose(float(result["squares"]), squares, rel_tol=1e-4, abs_tol=1e-9):
        fault = "stock peft loads it without an error and leaves a part of it out"
    elif not difference <= _OF_EFFECT * effect + _OF_LOGITS * scale:
        fault = "in stock peft its logits are not those of the source"
    relative = difference / effect if effect else difference
    return Checked(not fault, relative, difference, effect, str(result["peft"]), weights, fault)


def _twin(base: BaseModel) -> PreTrainedModel:
    """Build a model of the base's kind with random weights, at its own sizes where those are small."""
    numbers = (tensor.numel() for tensor in cast("Iterable[Tensor]", base.model.parameters()))
    config = copy.deepcopy(base.config) if sum(numbers) <= _SMALL else twin.shrink(base.config)
    vars(config).pop("quantization_config", None)
    config.architectures = [type(base.model).__name__]  # of a model with towers, or of its text alone
    return twin.build(config, _SEED)


def _cut(factors: Factors, targets: Mapping[str, Target]) -> Factors | None:
    """Return the factors at the sizes of the twin; None for a weight that it lacks."""
    target = targets.get(factors.target.name)
    if target is None or (target.experts > 0) != (factors.target.experts > 0):
        return None
    a, b = factors.a[..., : target.in_features], factors.b
    if target.is_gate_up and not target.interleaved:
        gate, up = b.chunk(2, dim=1)
        b = torch.cat((gate[:, : target.out_features // 2], up[:, : target.out_features // 2]), 1)
    else:
        b = b[..., : target.out_features, :]
    if target.experts:
        a, b = a[: target.experts], b[: target.experts]
    return Factors(target, a.contiguous(), b.contiguous(), factors.scaling)


def _add(model: PreTrainedModel, factors: Sequence[Factors]) -> None:
    with torch.no_grad():
        for added in factors:
            weight = cast("Tensor", model.get_parameter(added.target.name))
            if not added.target.experts:
                weight += added.delta()
                continue
            for expert in range(added.target.experts):
                delta = added.delta(expert)
                weight[expert] += delta.t() if added.target.transposed else delta


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it says nothing"


# Of factors


def _compared(wanted: Sequence[Factors], exported: Sequence[Factors]) -> Checked:
    """Compare the changes that the factors of both make to each weight, relative to the largest one."""
    there = {factors.target.name: factors for factors in exported}
    worst = effect = difference = 0.0
    for factors in wanted:
        other = there.get(factors.target.name)
        if other is None:
            words = f"`{factors.target.name}` has no factors in the file"
            return Checked(False, math.inf, math.inf, 0.0, "", len(wanted), words)
        for expert in range(factors.target.experts) if factors.target.experts else (None,):
            delta = factors.delta(expert)
            apart, largest = float((delta - other.delta(expert)).abs().max()), float(delta.abs().max())
            worst = max(worst, apart / largest if largest else apart)
            effect, difference = max(effect, largest), max(difference, apart)
    words = "" if worst <= 1e-5 else "read back, the factors are not those of the source"
    return Checked(not words, worst, difference, effect, "", len(wanted), words)
