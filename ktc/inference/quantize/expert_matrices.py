"""Experts that a checkpoint stores as stacks, read as one matrix (out, in) for each expert and part.

INT4's format describes single layers, and stacks have as many scales per expert as rows. In: an index of weights and
the stock model on meta. Out: an index with matrices in place of stacks, under the names that the family's files of
single experts have (`experts.3.gate_proj.weight`), and a reader of their rows. Memory holds the matrix of one expert.
Refused (Q502): stacks whose matrices have no such name, or cannot be cut out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from ktc.adapters.base_model import BaseModel, Target
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.index import CheckpointIndex
from ktc.model.checkpoint.reader import RowReader
from ktc.model.checkpoint.source import Step
from ktc.model.checkpoint.values import laid_out
from ktc.model.hf.conversions import Place, Placed, Unmappable, names_one_by_one, placer
from ktc.model.hf.expert_layout import has_columns

FLOATS: Final = ("bf16", "f16", "f32")
_LEAVES: Final = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows (first, step, count) of one expert of a stack, which `steps` and `transposed` turn into (out, in)."""

    stack: TensorEntry
    expert: int
    rows: tuple[int, int, int]
    steps: tuple[Step, ...]
    transposed: bool


class ExpertMatrices:
    """`index` has the matrices of the stacks in modules that `chosen` accepts; `stacks` counts those stacks.

    `turned` are the model's tensors that have columns, while their module does not say so.
    """

    def __init__(self, base: BaseModel, index: CheckpointIndex, chosen: Callable[[str], bool]) -> None:
        """Read shapes and names alone. Raises InputRefused (Q502)."""
        find = placer(base.model, base.model.state_dict())
        names = {**_LEAVES, **names_one_by_one(base.model)}
        self._cuts: dict[str, _Cut] = {}
        self.stacks = 0
        tensors: dict[str, TensorEntry] = {}
        problems: list[Diagnostic] = []
        turned = set[str]()
        for entry in index.tensors.values():
            place = find(entry.name, entry.shape)
            target = base.targets.get(place.target) if isinstance(place, Place) else None
            if target is None or not target.experts or not _is_stack(entry) or not chosen(target.module):
                tensors[entry.name] = entry
                continue
            assert isinstance(place, Place), "it has a target"
            multiplied = _as_held(base, target)
            if multiplied is not target:
                turned.add(target.name)
            target = multiplied
            try:
                cut = dict(_cut(entry, place, target, names, find))
            except _Refused as error:
                problems.append(_refusal(base, entry, str(error)))
                continue
            self.stacks += 1
            self._cuts |= {matrix.name: of for matrix, of in cut.items()}
            tensors |= {matrix.name: matrix for matrix in cut}
        if problems:
            raise InputRefused(*problems[:10])
        self.index, self.turned = replace(index, tensors=tensors), frozenset(turned)

    def reader(self, rows: RowReader) -> RowReader:
        """Return a reader of `index`'s entries over one of the stored weights."""
        return _MatrixReader(self._cuts, rows) if self._cuts else rows


class _Refused(Exception):
    """A stack whose matrices have no place; carries the reason."""


def _as_held(base: BaseModel, target: Target) -> Target:
    """Return the target with outputs and inputs as the model multiplies them, where its module does not say so."""
    if target.transposed or not has_columns(base.model.get_submodule(target.module)):
        return target
    return replace(target, out_features=target.in_features, in_features=target.out_features, transposed=True)


def _is_stack(entry: TensorEntry) -> bool:
    return len(entry.shape) == 3 and entry.dtype in FLOATS


def _cut(
    entry: TensorEntry, place: Place, target: Target, names: Mapping[str, str],
    find: Callable[[str, tuple[int, ...]], Placed],
) -> Iterator[tuple[TensorEntry, _Cut]]:  # fmt: skip
    """Yield the matrices of a stack, in order of experts, with where they are."""
    parts = list(_parts(place, target))
    if entry.shape[0] != target.experts or any(0 in step.dims for step in place.steps):
        raise _Refused(f"of shape {list(entry.shape)} are not {target.experts} experts one after another")
    whole = sum(count for _, (_, _, count) in parts)
    if math.prod(entry.shape) != target.experts * whole * target.in_features:
        raise _Refused(f"of shape {list(entry.shape)} are not {whole} rows of {target.in_features} for each expert")
    begin = entry.begin
    for expert in range(target.experts):
        for part, rows in parts:
            shape = (rows[2], target.in_features)
            size = math.prod(shape) * (entry.end - entry.begin) // math.prod(entry.shape)
            wanted = replace(place, expert=expert, part=part, steps=(), joined=None)
            name = _name(entry, wanted, shape, names, find)
            matrix = TensorEntry(name, entry.file, entry.dtype, shape, begin, begin + size)
            yield matrix, _Cut(entry, expert, rows, place.steps, target.transposed)
            begin += size


def _parts(place: Place, target: Target) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the parts of a stack, and (first, step, count) of their rows."""
    rows = target.out_features
    if not target.is_gate_up:
        yield target.leaf.removesuffix("_proj"), (0, 1, rows)
    elif place.joined is not None:
        yield ("gate", "up")[place.joined[1]], (0, 1, rows // 2)
    else:
        for number, part in enumerate(("gate", "up")):
            yield part, ((number, 2, rows // 2) if target.interleaved else (number * (rows // 2), 1, rows // 2))


def _name(
    entry: TensorEntry, wanted: Place, shape: tuple[int, ...], names: Mapping[str, str],
    find: Callable[[str, tuple[int, ...]], Placed],
) -> str:  # fmt: skip
    """Return the name of one expert's matrix: beside the stack's own, or in the model's terms."""
    reason = "has no name in files of single experts"
    stems = (entry.name.removesuffix(".weight").rpartition(".")[0], wanted.target.rpartition(".")[0])
    for stem in stems:
        name = f"{stem}.{wanted.expert}.{names[wanted.part or '']}.weight"
        placed = find(name, shape)
        if placed == wanted:
            return name
        if isinstance(placed, Unmappable):
            reason = placed.reason
    raise _Refused(reason)


def _refusal(base: BaseModel, entry: TensorEntry, why: str) -> Diagnostic:
    message = f"INT4 describes single matrices, and one of the stack `{entry.name}` of `{base.name}` {why}"
    hint = "`fake_quant(int4)` and `quantize(int4)` round the experts when the model is loaded"
    return Diagnostic("Q502", message, hint=hint)


class _MatrixReader:
    """Reads rows as a `RowReader`, those of one expert's matrix out of its stack."""

    def __init__(self, cuts: Mapping[str, _Cut], rows: RowReader) -> None:
        self._cuts, self._rows = cuts, rows
        self._kept: tuple[tuple[str, int], Tensor] | None = None

    def read(self, entry: TensorEntry, rows: slice | None = None) -> Tensor:
        """Return the tensor, or the `rows` of its first dimension (no step), in the dtype of `entry`."""
        cut = self._cuts.get(entry.name)
        if cut is None:
            return self._rows.read(entry, rows)
        first, step, count = cut.rows
        return self._expert(cut)[first : first + step * count : step][rows or slice(None)].contiguous()

    def _expert(self, cut: _Cut) -> Tensor:
        """Return all rows (out, in) of an expert; gate and up are read once."""
        key = (cut.stack.name, cut.expert)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # before the next: one is in memory at a time
            matrix = self._rows.read(cut.stack, slice(cut.expert, cut.expert + 1))[0]
            matrix = laid_out(matrix, cut.steps, 1)
            self._kept = key, matrix.t() if cut.transposed else matrix
        return self._kept[1]
