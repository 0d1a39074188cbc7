"""The `plan` and `lora` blocks: at most one of each in a program, known keys, values of the right type and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktc.diagnostics import Related, Span, listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.expressions import Expressions
from ktc.language.dsl.checker.names import UnitNames
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.schema import BLOCKS, BOUNDS, DEVICE_FAMILIES, RETIRED
from ktc.language.dsl.types import SIZE, Type
from ktc.model.targets.settings import Bounds, Value


@dataclass(frozen=True, slots=True)
class CheckedBlock:
    """A block's values by key, with the span of each. Both are empty without a block."""

    values: Mapping[str, Value]
    spans: Mapping[str, Span]
    unit: int = 0
    span: Span | None = None


def check_blocks(units: list[UnitNames], report: Report) -> dict[str, CheckedBlock]:
    """Return the program's `plan` and `lora`."""
    blocks = {kind: CheckedBlock({}, {}) for kind in BLOCKS}
    for unit in units:
        for declaration in unit.source.module.declarations:
            if not isinstance(declaration, syntax.Block):
                continue
            first = blocks[declaration.kind].span
            if first is not None:
                message = f"a program has one `{declaration.kind}` block"
                report.error("E043", message, declaration.span, related=(Related(first, "the first one"),))
                continue
            blocks[declaration.kind] = _check_block(unit, declaration, report)
    return {**blocks, "lora": _complete_lora(blocks["lora"], report)}


def check_bounds(key: str, value: Value, bounds: Bounds | None, span: Span, report: Report) -> None:
    """Report a number outside the bounds of its key."""
    if bounds is not None and isinstance(value, int | float) and not bounds.low <= value <= bounds.high:
        report.error("E032", f"`{key}` = {value} is outside {bounds.low:.0f}..{bounds.high:.0f}", span)


def _check_block(unit: UnitNames, block: syntax.Block, report: Report) -> CheckedBlock:
    values: dict[str, Value] = {}
    spans: dict[str, Span] = {}
    expressions = Expressions(report, unit, {})
    for setting in block.settings:
        key = setting.key.text
        wanted = _key_type(block.kind, key)
        if wanted is None:
            keys = [*BLOCKS[block.kind], *(("cpu", "cuda:0") if block.kind == "plan" else ())]
            hint = RETIRED.get((block.kind, key)) or suggest(key, keys) or f"keys: {listing(keys, 20)}"
            if key in DEVICE_FAMILIES:
                hint = f"a budget is for one device: `{key}:0`"
            report.error("E025", f"`{block.kind}` has no key `{key}`", setting.key.span, hint=hint)
        elif key in spans:
            related = (Related(spans[key], "first value"),)
            report.error("E020", f"`{key}` is given twice", setting.key.span, related=related)
        else:
            spans[key] = setting.key.span
            value = expressions.value(setting.value, wanted)
            if value is not None:
                values[key] = value
                check_bounds(key, value, BOUNDS.get(key), setting.value.span, report)
    return CheckedBlock(values, spans, unit.source.index, block.span)


def _key_type(kind: str, key: str) -> Type | None:
    is_device = key == "cpu" or ":" in key  # the grammar puts a colon into devices only
    return SIZE if kind == "plan" and is_device else BLOCKS[kind].get(key)


def _complete_lora(block: CheckedBlock, report: Report) -> CheckedBlock:
    """Fill in an adapter's defaults: no dropout, and `alpha = rank`, a scale of one."""
    if block.span is None:
        return block
    if "rank" not in block.spans:
        report.error("E031", "the `lora` block needs `rank`", block.span, hint="for example `rank = 8`")
    rank = block.values.get("rank")
    defaults: dict[str, Value] = {"alpha": float(rank) if isinstance(rank, int) else None, "dropout": 0.0}
    return CheckedBlock({**defaults, **block.values}, block.spans, block.unit, block.span)
