"""The factors of each adapted weight as tensors: read from any layout, one meaning for all of them.

In: a `Placed` weight of an adapter's file. Out: its `Factors`, A (r, in) and B (out, r), stacked for experts.
The factors of gate and up are joined to those of one weight and split again; stacks are laid out as PEFT keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ktc.adapters.base_model import Target
from ktc.model.checkpoint.header import TensorEntry

Layout = Literal["per-expert", "peft-fused", "peft-fused-018"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The two tensors of one pair of factors; of an expert's projection its number and part (gate, up, down)."""

    a: TensorEntry
    b: TensorEntry
    expert: int = 0
    part: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """The factors of one weight in the file. `r` and `scaling` are those of each pair."""

    target: Target
    r: int
    scaling: float
    slots: tuple[Slot, ...]
    layout: Layout | None = None  # None: a plain layer

    @property
    def name(self) -> str:
        return self.target.name


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of the model that was trained as a whole: `name` in the model, `entry` in the adapter's file.

    `target` is that of a stack of experts, `None` for any other tensor.
    """

    name: str
    entry: TensorEntry
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors whose `scaling * B @ A` is added to a weight (out, in): A (r, in), B (out, r); for experts (E, ...)."""

    target: Target
    a: Tensor
    b: Tensor
    scaling: float

    @property
    def r(self) -> int:
        return int(self.a.shape[-2])

    def delta(self, expert: int | None = None, rows: slice = slice(None)) -> Tensor:
        """Return rows of the sum's second term for one matrix (out, in), in fp32."""
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        return (b[rows].float() @ a.float()) * self.scaling


class FactorReader:
    """Reads factors from an adapter's file, one weight at a time. Use it as a context manager."""

    def __init__(self, weights: Path) -> None:
        from safetensors import safe_open

        self._opened = cast("Any", safe_open)(weights, framework="pt")

    def __enter__(self) -> FactorReader:
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def read_whole(self, whole: Whole, expert: int | None, part: str, rows: slice) -> Tensor:
        """Return `rows` of a trained tensor, or of gate or up of one `expert` in a stack of both."""
        stored = self._file.get_slice(whole.entry.name)
        if expert is None or whole.target is None:
            return cast("Tensor", stored[rows])
        matrix = cast("Tensor", stored[expert])
        matrix = matrix.t() if whole.target.transposed else matrix
        if part:
            gate_and_up = (matrix[0::2], matrix[1::2]) if whole.target.interleaved else matrix.chunk(2)
            matrix = gate_and_up[part == "up"]
        return matrix[rows]

    def read(self, placed: Placed) -> Factors:
        """Return the factors of one weight as stored. gate and up with two A's get twice the rank."""
        if placed.layout == "per-expert":
            return _stacked(placed, self._file.get_tensor)
        a, b = (cast("Tensor", self._file.get_tensor(e.name)) for e in (placed.slots[0].a, placed.slots[0].b))
        if placed.layout is None:
            return Factors(placed.target, a, b, placed.scaling)
        experts, r = placed.target.experts, placed.r
        by_expert, by_rank = a.reshape(experts, r, -1), b.reshape(-1, r, experts).permute(2, 0, 1)
        if placed.layout == "peft-fused-018" and not placed.target.transposed:
            by_expert, by_rank = by_rank.transpose(1, 2), by_expert.transpose(1, 2)
        return Factors(placed.target, by_expert, by_rank, placed.scaling)


def packed(factors: Factors, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return A and B of stacked experts in the fused `layout`: expert by expert, and rank by rank."""
    a, b = factors.a, factors.b
    if layout == "peft-fused-018" and not factors.target.transposed:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.reshape(-1, a.shape[2]).contiguous(), b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()


def _stacked(placed: Placed, get: Callable[[str], Tensor]) -> Factors:
    """Stack the factors of single experts; experts without factors have zeros."""
    target = placed.target
    read = {(s.expert, s.part): (get(s.a.name), get(s.b.name)) for s in placed.slots}
    first = next(iter(read.values()))[0]
    parts = ("gate", "up") if target.is_gate_up else ("down",)
    rows = target.out_features // len(parts)
    nothing = (first.new_zeros(placed.r, target.in_features), first.new_zeros(rows, placed.r))
    a, b = (
        [torch.stack([read.get((expert, part), nothing)[side] for expert in range(target.experts)]) for part in parts]
        for side in (0, 1)
    )
    if len(parts) == 1:
        return Factors(target, a[0], b[0], placed.scaling)
    return joined(target, (a[0], b[0]), (a[1], b[1]), placed.scaling)


def joined(target: Target, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], scaling: float) -> Factors:
    """Join gate's and up's factors (E, r, in) and (E, I, r) into those of one weight, rows of gate first.

    An A that both share is kept, as in a split fused adapter; otherwise the ranks are concatenated.
    """
    if torch.equal(gate[0], up[0]):
        a, b = gate[0], torch.cat((gate[1], up[1]), 1)
    else:
        a = torch.cat((gate[0], up[0]), 1)
        none = (
            gate[1].new_zeros(*gate[1].shape[:2], up[1].shape[2]),
            up[1].new_zeros(up[1].shape[0], up[1].shape[1], gate[1].shape[2]),
        )
        b = torch.cat((torch.cat((gate[1], none[0]), 2), torch.cat((none[1], up[1]), 2)), 1)
    if target.interleaved:
        b = b.reshape(b.shape[0], 2, -1, b.shape[2]).transpose(1, 2).reshape(b.shape)
    return Factors(target, a, b, scaling)


def halves(factors: Factors) -> tuple[Tensor, Tensor]:
    """Return B of gate and B of up (E, I, r), of the one B that they share in a stack of both."""
    b = factors.b
    if factors.target.interleaved:
        return b[:, 0::2], b[:, 1::2]
    gate, up = b.chunk(2, dim=1)
    return gate, up
