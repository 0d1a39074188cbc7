"""Rows of `weights.json` that fill a module which keeps its experts in a packed form of its own.

In: the module and a row. Out: whether the row fits, what each matrix of it is, and, where the module multiplies what
the checkpoint stores, codes or blocks taken to it without a rounding. Refused: scales that are not finite (L407).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

from torch import Tensor, nn

from ktc.checkpoint import CheckpointIndex, WeightSource, gguf_values
from ktc.checkpoint.reader import TensorReader
from ktc.checkpoint.values import read_blocks, read_codes
from ktc.diagnostics import InputRefused
from ktc.experts.form import ExpertsForm
from ktc.experts.module import Part
from ktc.experts.stock_layout import StockTensor, canonical_parts, half_of, stock_names, stock_shape
from ktc.model.finite_weights import are_numbers, is_finite, not_finite

Loader = Callable[[TensorReader, CheckpointIndex, int | None], None]


@runtime_checkable
class ExpertBank(Protocol):
    """A module that keeps its experts in a packed form of its own."""

    form: ExpertsForm
    num_experts: int
    hidden: int
    intermediate: int

    def load_expert(self, expert: int, part: Part, tensor: Tensor) -> None: ...
    def takes_codes(self, part: Part, method: str, group: int) -> bool: ...
    def load_codes(self, expert: int, part: Part, codes: Tensor, scales: Tensor) -> None: ...
    def missing(self) -> tuple[tuple[int, Part], ...]: ...


@runtime_checkable
class BlockBank(Protocol):
    """A bank that may multiply blocks of a GGUF type as they are."""

    def takes_blocks(self, part: Part, type_name: str) -> bool: ...
    def load_blocks(self, expert: int, part: Part, blocks: Tensor) -> None: ...


def misfit_of_bank(bank: ExpertBank, source: WeightSource, leaf: str) -> str:
    """Why the bank is not filled so; empty where only shapes are left to compare."""
    if leaf not in stock_names(bank.form) or source.part is None:
        return f"experts of the form `{bank.form}` are not filled so"
    half = is_half(source, leaf)
    if half and source.span is None and (bank.form.transposed or bank.form.interleaved):
        return f"experts of the form `{bank.form}` are not joined of gate and up"
    if source.span is not None and (
        not half or (source.span, source.stride) != half_of(bank.form, leaf, source.part, bank.intermediate)
    ):
        return f"experts of the form `{bank.form}` have no `{source.part}` there"
    return ""


def stock_shape_of(bank: ExpertBank, leaf: str) -> tuple[int, ...]:
    """The shape that the tensor `leaf` has in the stock module that a bank stands for."""
    return stock_shape(bank.form, cast("StockTensor", leaf), bank.num_experts, bank.hidden, bank.intermediate)


def is_half(source: WeightSource, leaf: str) -> bool:
    """Gate or up, or a bias of theirs, stored apart, that are one tensor in the model."""
    halves = {"gate_up_proj": ("gate", "up"), "gate_up_proj_bias": ("gate_bias", "up_bias")}
    return source.part in halves.get(leaf, ())


def by_part(
    source: WeightSource, form: ExpertsForm, leaf: StockTensor, tensor: Tensor
) -> Iterable[tuple[Part, Tensor]]:
    """What an expert's slice, or a half of it that is stored apart, holds."""
    if is_half(source, leaf):
        turned = form.transposed and tensor.dim() == 2  # the row is written for the stock tensor
        return [(cast("Part", source.part), tensor.t() if turned else tensor)]
    return canonical_parts(form, leaf, tensor)


def stored_loader(model: nn.Module, source: WeightSource, allow_nonfinite: bool) -> Loader | None:
    """What takes an expert of a row to its bank as it is stored; `None` where the bank wants weights."""
    parent, _, name = source.target.rpartition(".")
    bank, leaf = model.get_submodule(parent), cast("StockTensor", name)
    if not isinstance(bank, ExpertBank):
        return None
    row = _StoredRow(bank, source, leaf, allow_nonfinite)
    codes, blocks = source.plain_codes, source.plain_blocks
    if codes is not None and all(bank.takes_codes(part, *codes) for part in row.parts):
        return row.load_codes
    in_order = bool(source.steps) == bank.form.transposed
    if blocks is None or not in_order or not isinstance(bank, BlockBank):
        return None
    return row.load_blocks if all(bank.takes_blocks(part, blocks) for part in row.parts) else None


@dataclass(frozen=True, slots=True)
class _StoredRow:
    """A row whose bank multiplies what it stores."""

    bank: ExpertBank
    source: WeightSource
    leaf: StockTensor
    allow_nonfinite: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the matrices of the row are."""
        if self.leaf == "gate_up_proj" and not is_half(self.source, self.leaf):
            return ("gate", "up")
        return (cast("Part", self.source.part),)

    def load_codes(self, reader: TensorReader, index: CheckpointIndex, expert: int | None) -> None:
        codes, scales = read_codes(reader, index, self.source, expert)
        number = self._checked(is_finite(scales) and are_numbers(codes), expert)
        pieces = (by_part(self.source, self.bank.form, self.leaf, tensor) for tensor in (codes, scales))
        for (part, piece), (_, scale) in zip(*pieces, strict=True):
            self.bank.load_codes(number, part, piece, scale)

    def load_blocks(self, reader: TensorReader, index: CheckpointIndex, expert: int | None) -> None:
        blocks = read_blocks(reader, index, self.source, expert)
        number = self._checked(gguf_values.are_finite(blocks, self.source.plain_blocks or ""), expert)
        as_rows = replace(self.bank.form, transposed=False)  # blocks are read as rows of outputs
        for part, piece in by_part(self.source, as_rows, self.leaf, blocks):
            cast("BlockBank", self.bank).load_blocks(number, part, piece)

    def _checked(self, finite: bool, expert: int | None) -> int:
        assert expert is not None, f"the row of `{self.source.target}` names no expert"
        if not (finite or self.allow_nonfinite):
            raise InputRefused(not_finite(self.source, expert))
        return expert
