"""Rows of `weights.json` for experts that the model keeps as a list: each matrix goes to the stack that replaces it.

In: rows that name `experts.3.w1.weight`. Out: rows for expert 3 of `experts.gate_up_proj`, where a rewrite made the
list one module; all others stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from ktc.model.checkpoint import Part, WeightSource
from ktc.model.kernels.form import parse_form
from ktc.stages.capture import ExpertList
from ktc.stages.rewrite.apply import RewrittenBlock
from ktc.stages.rewrite.own_rows import own_rows, stock_tensor


def stack_rows(rows: Sequence[WeightSource], blocks: Sequence[RewrittenBlock]) -> tuple[WeightSource, ...]:
    """Return the rows in their order."""
    places: dict[str, tuple[str, int, Part]] = {}
    for block in blocks:
        if block.experts is not None:
            for site in block.rewrite.sites:
                places |= _places(f"{site.fqn}.{block.experts.fqn}", block.experts)
    stacked = (_stacked(row, places[row.target]) if row.target in places else row for row in rows)
    return own_rows(stacked, blocks)


def _places(prefix: str, experts: ExpertList) -> dict[str, tuple[str, int, Part]]:
    form = parse_form(experts.form)
    places: dict[str, tuple[str, int, Part]] = {}
    for part, name in experts.parts.items():
        stock = stock_tensor(form, part)
        for expert in range(experts.count):
            places[f"{prefix}.{expert}.{name}"] = (f"{prefix}.{stock}", expert, cast("Part", part))
    return places


def _stacked(row: WeightSource, place: tuple[str, int, Part]) -> WeightSource:
    target, expert, part = place
    return replace(row, target=target, expert=expert, part=part)
