"""Weights from a checkpoint into a model, one tensor at a time, each straight to its place and device.

In: a model on meta tensors with its modules realised, and the rows of `weights.json`. Out: the same model, filled.
What is resident grows by what stays: experts go to their packed form one matrix at a time, and a fused tensor is read
one expert at a time. Refused: a value that is not finite, a parameter that nothing filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from ktc.checkpoint import CheckpointIndex, WeightSource
from ktc.checkpoint.reader import TensorReader
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.runtime.fused_moe import Part
from ktc.runtime.placement import device_of
from ktc.runtime.progress import Progress


@runtime_checkable
class ExpertBank(Protocol):
    """A module that keeps its experts in a form of its own."""

    def load_expert(self, expert: int, part: Part, tensor: Tensor) -> None: ...
    def missing(self) -> tuple[tuple[int, Part], ...]: ...


def fill(
    model: nn.Module,
    sources: Sequence[WeightSource],
    index: CheckpointIndex,
    placement: Mapping[str, str],
    *,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Read every row of `sources` into `model`, in the dtypes that its meta tensors have.

    Raises `InputRefused`: L406 where the checkpoint is not the one that was compiled, L408 for rows
    that fit nothing in the model, L407 for a tensor with a value
    that is not finite, I112 for a file that was cut short.
    """
    _check_targets(model, sources)
    _check_unchanged(sources, index)
    total = sum(index.tensors[source.source_key].end - index.tensors[source.source_key].begin for source in sources)
    done = 0
    with TensorReader(index.folder) as reader, torch.no_grad():
        for source in sources:
            entry = index.tensors[source.source_key]
            for expert, rows in _pieces(source):
                tensor = reader.read(entry, rows)
                if not allow_nonfinite and not _is_finite(tensor):
                    raise InputRefused(_not_finite(source, expert))
                _put(model, source, expert, tensor, placement)
                del tensor  # before the next read: one piece is held at a time
            done += entry.end - entry.begin
            if progress is not None:
                progress(done, total)


def _check_unchanged(sources: Iterable[WeightSource], index: CheckpointIndex) -> None:
    hint = "compile the model again, or name the checkpoint it was compiled from: `load(weights=...)`"
    problems: list[Diagnostic] = []
    for source in sources:
        entry = index.tensors.get(source.source_key)
        found = "no such tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        if found != f"{source.dtype} {list(source.shape)}":
            expected = f"compiled from {source.dtype} {list(source.shape)}"
            problems.append(
                Diagnostic("L406", f"`{source.source_key}` was {expected}, the checkpoint has {found}", hint=hint)
            )
    if problems:
        raise InputRefused(*problems[:10])


def _check_targets(model: nn.Module, sources: Iterable[WeightSource]) -> None:
    """Rows that name what the model does not have, or something of another shape."""
    hint = "`weights.json` does not belong to this model; compile it again"
    problems = [
        Diagnostic("L408", f"`weights.json` fills `{source.target}` from `{source.source_key}`: {fault}", hint=hint)
        for source in sources
        if (fault := _misfit(model, source))
    ]
    if problems:
        raise InputRefused(*problems[:10])


def _misfit(model: nn.Module, source: WeightSource) -> str:
    """Why a row cannot be followed; empty if it can."""
    parent, _, leaf = source.target.rpartition(".")
    try:
        module = model.get_submodule(parent)
    except AttributeError:
        return "the model has no such module"
    held = getattr(module, leaf, None)
    if not isinstance(held, Tensor):
        return "the model has no such tensor"
    shape = tuple(held.shape)
    if source.part is None:
        return "" if shape == source.shape else f"it is {list(shape)}, the row says {list(source.shape)}"
    if len(shape) != 3 or (source.part == "down") != (leaf == "down_proj"):
        return f"it is no stack of experts that holds `{source.part}`"
    rows = shape[1] // 2 if source.part in ("gate", "up") else shape[1]
    wanted = (shape[0], rows, shape[2]) if source.transform == "per_expert" else (rows, shape[2])
    if (source.expert or 0) >= shape[0] or wanted != source.shape:
        return f"it is {list(shape)}, the row says {list(source.shape)} of expert {source.expert}"
    return ""


def _pieces(source: WeightSource) -> Iterable[tuple[int | None, slice | None]]:
    """What to read of the tensor, one after the other: the rows, and the expert they are."""
    if source.transform == "copy":
        return [(source.expert, None)]
    return [(expert, slice(expert, expert + 1)) for expert in range(source.shape[0])]


def _put(
    model: nn.Module, source: WeightSource, expert: int | None, tensor: Tensor, placement: Mapping[str, str]
) -> None:
    parent, _, leaf = source.target.rpartition(".")
    module = model.get_submodule(parent)
    if expert is None:
        _assign(module, leaf, tensor.to(device_of(source.target, placement), getattr(module, leaf).dtype))
        return
    matrix = tensor[0] if source.transform == "per_expert" else tensor
    for part, piece in _by_part(source, matrix):
        if isinstance(module, ExpertBank):
            module.load_expert(expert, part, piece)
        else:
            _rows(_materialised(module, leaf, device_of(source.target, placement))[expert], part).copy_(piece)


def _by_part(source: WeightSource, matrix: Tensor) -> Iterable[tuple[Part, Tensor]]:
    if source.part == "gate_up":
        gate, up = matrix.chunk(2)
        return [("gate", gate), ("up", up)]
    assert source.part is not None, f"the row of `{source.target}` names an expert but no part"
    return [(source.part, matrix)]


def _rows(matrix: Tensor, part: Part) -> Tensor:
    """The rows of an expert's matrix that hold `part`; gate and up share one."""
    if part == "down":
        return matrix
    gate, up = matrix.chunk(2)
    return gate if part == "gate" else up


def _materialised(module: nn.Module, leaf: str, device: torch.device) -> Tensor:
    """The stacked experts of a module that no rule rewrote, allocated at the first use."""
    tensor = cast("Tensor", getattr(module, leaf))
    if tensor.is_meta:
        _assign(module, leaf, torch.empty_like(tensor, device=device))
    return cast("Tensor", getattr(module, leaf))


def _assign(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    old = getattr(module, leaf)
    if isinstance(old, nn.Parameter):
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(module, leaf, tensor)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()  # one pass without a copy; a NaN becomes both bounds
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _not_finite(source: WeightSource, expert: int | None) -> Diagnostic:
    which = "" if expert is None or source.expert is not None else f" (expert {expert})"
    return Diagnostic(
        "L407",
        f"tensor `{source.source_key}`{which} in `{source.file}` holds values that are not finite",
        hint="download the file again; `load(allow_nonfinite=True)` takes it as it is",
    )


def check_filled(model: nn.Module) -> None:
    """Raises `InputRefused` (L408) with everything that is still without a value."""
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    for name, module in modules:
        if isinstance(module, ExpertBank):
            empty += [f"{name} (expert {expert}, {part})" for expert, part in module.missing()]
    if empty:
        shown = ", ".join(f"`{name}`" for name in empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        hint = "`weights.json` does not belong to this model; compile it again"
        raise InputRefused(Diagnostic("L408", f"nothing in the checkpoint fills {shown}", hint=hint))
