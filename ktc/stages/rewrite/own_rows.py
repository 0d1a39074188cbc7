"""Rows of `weights.json` for experts modules of the model's own: each tensor goes to the stock layout of their form.

In: rows that name a module's own parameters, such as `experts.mlp.w1` with all experts one after another. Out: rows for
`experts.gate_up_proj` and the like; all others stay as they are. Refused (I119): codes, where experts must be cut out
of a tensor or turned, and a stack of another number of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.checkpoint import Part, Step, WeightSource
from ktc.model.experts.layouts.stock_layout import StockTensor, half_of
from ktc.model.experts.own_module import OwnExperts, TensorLayout
from ktc.model.kernels.form import ExpertsForm
from ktc.stages.rewrite.apply import RewrittenBlock


@dataclass(frozen=True, slots=True)
class _Place:
    """The part that a parameter holds, and its place in the model."""

    module: OwnExperts
    part: str
    layout: TensorLayout
    fqn: str

    @property
    def target(self) -> str:
        return f"{self.fqn}.{stock_tensor(self.module.form, self.part)}"


def own_rows(rows: Iterable[WeightSource], blocks: Sequence[RewrittenBlock]) -> tuple[WeightSource, ...]:
    """Return the rows in their order. A row of an expert that has no matrices is left out."""
    places: dict[str, _Place] = {}
    for block in blocks:
        for module in block.own_experts:
            for site in block.rewrite.sites:
                fqn = f"{site.fqn}.{module.fqn}".rstrip(".")
                places |= {
                    f"{fqn}.{layout.name}": _Place(module, part, layout, fqn) for part, layout in module.parts.items()
                }
    moved = (_row(row, places[row.target]) if row.target in places else row for row in rows)
    return tuple(row for row in moved if row is not None)


def stock_tensor(form: ExpertsForm, part: str) -> StockTensor:
    """Return the tensor of a stock experts module that has a part of the experts, such as `gate` or `down_bias`."""
    kind, bias = part.removesuffix("_bias"), "_bias" if part.endswith("_bias") else ""
    joined = form.gated and kind in ("gate", "up")
    return cast("StockTensor", f"{'gate_up' if joined else kind}_proj{bias}")


def _row(row: WeightSource, place: _Place) -> WeightSource | None:
    count = place.module.sizes[0]
    turns = place.layout.turned != place.module.form.transposed
    if row.expert is not None and row.target == place.target:  # a matrix (out, in) of one expert
        return row if row.expert < count else None
    if row.transform == "per_expert" and not turns and row.target == place.target and row.shape[0] == count:
        return row
    plain = row.quantised is None and row.block is None and row.expert is None and row.span is None
    shape = row.loaded_shape
    if not plain or row.transform != "copy" or (place.layout.flat and row.steps):
        raise InputRefused(_refused(row, "is stored in a way that its experts cannot be taken from"))
    if (shape[0] % count) if place.layout.flat else (shape[0] != count):
        raise InputRefused(_refused(row, f"is not of {count} experts"))
    steps = (Step("unflatten", (0, count)), *row.steps) if place.layout.flat else row.steps
    steps = (*steps, Step("transpose", (1, 2))) if turns and not place.part.endswith("_bias") else steps
    moved = replace(row, target=place.target, part=cast("Part", place.part), transform="per_expert", steps=steps)
    if place.part.removesuffix("_bias") not in ("gate", "up") or not place.module.form.gated:
        return moved
    span, stride = half_of(
        place.module.form, stock_tensor(place.module.form, place.part), place.part, place.module.sizes[2]
    )
    return replace(moved, span=span, stride=stride)


def _refused(row: WeightSource, why: str) -> Diagnostic:
    hint = "use the unquantised checkpoint, or leave these experts to the model's own code"
    return Diagnostic("I119", f"tensor `{row.source_key}` of `{row.target}` {why}", hint=hint)
