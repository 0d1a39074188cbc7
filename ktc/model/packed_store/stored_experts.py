"""Rows of `weights.json` that fill a layer's experts.

In: the `FusedMoe` and a row. Out: whether the row fits, and the part of each of its matrices. Where the kernel
multiplies the checkpoint's codes or blocks, they are loaded without rounding. Refused: scales that are not finite
(L407).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from ktc.diagnostics import InputRefused
from ktc.model.checkpoint import CheckpointIndex, WeightSource, gguf_values
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.checkpoint.values import read_blocks, read_codes
from ktc.model.experts.layouts.stock_layout import StockTensor, canonical_parts, half_of, stock_names
from ktc.model.experts.module import FusedMoe
from ktc.model.graph.typed import owner_of
from ktc.model.kernels.form import ExpertPart, ExpertsForm
from ktc.model.packed_store.finite_weights import are_numbers, is_finite, not_finite

Pack = Callable[[], None]
Loader = Callable[[TensorReader, CheckpointIndex, int | None], Pack]
"""It reads an expert of a row, and returns the function that checks and packs it, on any thread."""


def misfit_of_experts(experts: FusedMoe, source: WeightSource, leaf: str) -> str:
    """Return why a row cannot fill the tensor `leaf` of the experts; "" if only shapes are left to compare."""
    if leaf not in stock_names(experts.form) or source.part is None:
        return f"experts of the form `{experts.form}` are not filled so"
    half = is_half(source, leaf)
    if half and source.span is None and source.expert is None and (experts.form.transposed or experts.form.interleaved):
        return f"experts of the form `{experts.form}` are not joined of gate and up"
    if source.span is not None and (
        not half or (source.span, source.stride) != half_of(experts.form, leaf, source.part, experts.intermediate)
    ):
        return f"experts of the form `{experts.form}` have no `{source.part}` there"
    return ""


def is_half(source: WeightSource, leaf: str) -> bool:
    """Return whether a row is gate or up, or their bias, stored apart, which are one tensor in the model."""
    halves = {"gate_up_proj": ("gate", "up"), "gate_up_proj_bias": ("gate_bias", "up_bias")}
    return source.part in halves.get(leaf, ())


def by_part(
    source: WeightSource, form: ExpertsForm, leaf: StockTensor, tensor: Tensor
) -> Iterable[tuple[ExpertPart, Tensor]]:
    """Yield the parts in an expert's slice, or in a half of it that is stored apart. One expert's matrix is rows."""
    if source.expert is not None and (is_half(source, leaf) or not leaf.startswith("gate_up")):
        return [(cast("ExpertPart", source.part), tensor)]
    if is_half(source, leaf):
        turned = form.transposed and tensor.dim() == 2  # the row is written for the stock tensor
        return [(cast("ExpertPart", source.part), tensor.t() if turned else tensor)]
    return canonical_parts(form, leaf, tensor)


def stored_loader(model: nn.Module, source: WeightSource, allow_nonfinite: bool) -> Loader | None:
    """Return the loader of a row that packs without rounding; `None` where the experts take values only."""
    experts, leaf = owner_of(model, source.target)
    if not isinstance(experts, FusedMoe):
        return None
    row = _StoredRow(experts, source, cast("StockTensor", leaf), allow_nonfinite)
    codes, blocks = source.plain_codes, source.plain_blocks
    if codes is not None and all(experts.weights.takes_codes(part, *codes) for part in row.parts):
        return row.load_codes
    in_order = source.expert is not None or bool(source.steps) == experts.form.transposed
    if blocks is None or not in_order:
        return None
    return row.load_blocks if all(experts.weights.takes_blocks(part, blocks) for part in row.parts) else None


@dataclass(frozen=True, slots=True)
class _StoredRow:
    """A row of codes or blocks that the experts multiply as they are."""

    experts: FusedMoe
    source: WeightSource
    leaf: StockTensor
    allow_nonfinite: bool

    @property
    def parts(self) -> tuple[ExpertPart, ...]:
        """The parts of experts in the row."""
        if self.leaf == "gate_up_proj" and not is_half(self.source, self.leaf):
            return ("gate", "up")
        return (cast("ExpertPart", self.source.part),)

    def load_codes(self, reader: TensorReader, index: CheckpointIndex, expert: int | None) -> Pack:
        read = read_codes(reader, index, self.source, expert)

        def pack() -> None:
            codes, scales = read()
            number = self._checked(is_finite(scales) and are_numbers(codes), expert)
            pieces = (by_part(self.source, self.experts.form, self.leaf, tensor) for tensor in (codes, scales))
            for (part, piece), (_, scale) in zip(*pieces, strict=True):
                self.experts.weights.load_codes(number, part, piece, scale)

        return pack

    def load_blocks(self, reader: TensorReader, index: CheckpointIndex, expert: int | None) -> Pack:
        read = read_blocks(reader, index, self.source, expert)
        as_rows = replace(self.experts.form, transposed=False)  # blocks are read as rows of outputs

        def pack() -> None:
            blocks = read()
            number = self._checked(gguf_values.are_finite(blocks, self.source.plain_blocks or ""), expert)
            for part, piece in by_part(self.source, as_rows, self.leaf, blocks):
                self.experts.weights.load_blocks(number, part, piece)

        return pack

    def _checked(self, finite: bool, expert: int | None) -> int:
        assert expert is not None, f"the row of `{self.source.target}` names no expert"
        if not (finite or self.allow_nonfinite):
            raise InputRefused(not_finite(self.source, expert))
        return expert
