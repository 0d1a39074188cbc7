"""Errors of outputs against the baseline, and the verdict.

In: outputs of the compiled model, of stock in its own dtype, and of the baseline, for the same input. Out: rows. The
error of a token is the norm of the difference over the norm of the baseline's output; the error of a row is the root
mean square over tokens, so that a few tokens with huge activations do not hide the others. Tokens for which a side
chose other experts are left out of its error and counted in its agreement: a near tie that rounding decides otherwise
is not a wrong weight. A row is red if ktc's error is above twice stock's own plus `FLOOR`, if either is not finite, or
if more tokens chose other experts than twice stock's own count and an allowance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktc.inference.prove.report import Kind, Row, Worst
from ktc.inference.prove.sides import Sides
from ktc.model.compare.errors import FLOOR, TWICE, root_mean_square, row_errors
from ktc.model.compare.feed import Tokens

TIMES_LARGEST = 4.0  # of stock's largest error of one output: a maximum varies more than a mean
UNSEEN = "choices of experts were not compared"
_SHOWN = 3  # worst tokens or experts of a row
_OTHER_CHOICES = {"layer": 0.05, "block": 0.01}  # of the tokens; a block is given equal input, a layer is not


@dataclass(frozen=True, slots=True)
class Output:
    """An output (tokens, anything) of one side, and by experts its choices (tokens, K), sorted."""

    values: Tensor
    choices: tuple[Tensor, ...] = ()


def same_choices(actual: Output, wanted: Output) -> Tensor | None:
    """Return for each token whether it has the same experts everywhere; `None` where a choice was not seen.

    Another number of experts is another choice.
    """
    if not wanted.choices or len(actual.choices) != len(wanted.choices):
        return None
    same = torch.ones(len(wanted.choices[0]), dtype=torch.bool)
    for one, other in zip(actual.choices, wanted.choices, strict=True):
        same &= (one == other).all(1) if one.shape == other.shape else torch.zeros_like(same)
    return same


def compare(what: str, kind: Kind, rewritten: bool, outputs: Sides[Output], tokens: Tokens) -> Row:
    """Return the row of a layer or block."""
    ktc, baseline = outputs.ktc, outputs.baseline
    errors, rounding = row_errors(ktc.values, baseline.values), row_errors(outputs.stock.values, baseline.values)
    same, own_same = same_choices(ktc, baseline), same_choices(outputs.stock, baseline)
    kept, own_kept = (torch.ones_like(rounding, dtype=torch.bool) if s is None else s for s in (same, own_same))
    agreements = [None if s is None else float(s.double().mean()) for s in (same, own_same)]
    row = Row(
        what, kind, rewritten, root_mean_square(errors[kept]), root_mean_square(rounding[own_kept]), *agreements,
        worst=_worst(errors.masked_fill(~kept, -1.0), tokens),
        note=UNSEEN if same is None and (baseline.choices or ktc.choices) else "",
    )  # fmt: skip
    lost = "its choices of experts were not seen, those of stock were" if same is None and baseline.choices else ""
    return replace(row, red=_too_large(row) or lost or _other_experts(row, len(errors), kind))


def compare_experts(what: str, outputs: Sides[Tensor], expert: Tensor) -> Row:
    """Return the row of experts that each ran alone: the errors of the one with the worst ratio.

    Outputs are (N, H), `expert` (N,) has the expert of each row. An expert is wrong too if one output of it is: the
    mean over thousands of outputs hides a wrong scale in one row of a matrix.
    """
    wanted, stock, ktc = outputs
    errors, rounding = row_errors(ktc, wanted), row_errors(stock, wanted)
    count = int(expert.max()) + 1
    of_ktc = [root_mean_square(errors[expert == number]) for number in range(count)]
    of_stock = [root_mean_square(rounding[expert == number]) for number in range(count)]
    order = sorted(range(count), key=lambda number: -_ratio(of_ktc[number], of_stock[number]))
    rows = [Row(what, "experts", True, of_ktc[number], of_stock[number]) for number in range(count)]
    largest = _largest(ktc, wanted, expert, count) / (
        TIMES_LARGEST * _largest(stock, wanted, expert, count) + TIMES_LARGEST * FLOOR
    )
    wrong = [number for number in order if _too_large(rows[number]) or float(largest[number]) > 1]
    row = rows[(wrong or order)[0]]
    worst = tuple(Worst(number, "", of_ktc[number]) for number in (wrong or order)[:_SHOWN])
    if not wrong:
        return replace(row, worst=worst)
    shown = ", ".join(map(str, sorted(wrong)[:8])) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
    why = _too_large(row) or "an output is wrong by more than any of stock"
    return replace(row, worst=worst, red=f"{why}: expert{'s' * (len(wrong) > 1)} {shown} of {count}")


def _largest(actual: Tensor, wanted: Tensor, expert: Tensor, count: int) -> Tensor:
    """Return for each expert the largest error of one output, relative to the root mean square of all its outputs."""
    actual, wanted = actual.double(), wanted.double()
    sizes = wanted.new_zeros(count).index_add(0, expert, wanted.square().mean(1)) / expert.bincount(minlength=count)
    errors = (actual - wanted).abs().amax(1)
    return wanted.new_zeros(count).scatter_reduce(0, expert, errors, "amax") / sizes.sqrt().clamp_min(1e-300)


def _ratio(ktc: float | None, stock: float | None) -> float:
    return math.inf if ktc is None else ktc / ((stock or 0.0) + FLOOR)


def _worst(errors: Tensor, tokens: Tokens) -> tuple[Worst, ...]:
    if len(errors) != tokens.ids.shape[1]:
        return ()
    order = errors.nan_to_num(math.inf).argsort(descending=True)[:_SHOWN]
    largest = [(int(position), float(errors[position])) for position in order]
    return tuple(
        Worst(position, tokens.piece(position), error if math.isfinite(error) else None)
        for position, error in largest
        if not error < 0
    )


def _too_large(row: Row) -> str:
    if row.ktc is None:
        return "the result is not finite" + (" on either side" if row.stock is None else "")
    if row.stock is None:
        return f"error {row.ktc:.1e} has no bound: stock's own result is not finite"
    if row.ktc <= TWICE * row.stock + FLOOR:
        return ""
    times = f"{row.ktc / row.stock:.1f} times stock's own error" if row.stock else "stock's own error is 0"
    return f"error {row.ktc:.1e} is {times}" if row.stock else f"error {row.ktc:.1e}, {times}"


def _other_experts(row: Row, tokens: int, kind: Kind) -> str:
    if row.agreement is None:
        return ""
    other = round((1 - row.agreement) * tokens)
    of_stock = round((1 - (1.0 if row.stock_agreement is None else row.stock_agreement)) * tokens)
    allowed = TWICE * of_stock + max(2, math.ceil(_OTHER_CHOICES[kind] * tokens))
    return "" if other <= allowed else f"{other} of {tokens} tokens chose other experts, with stock {of_stock}"
