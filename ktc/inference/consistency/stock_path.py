"""Log-probabilities of stock Hugging Face on the weights that a compiled model multiplies.

In: a compiled folder, and sequences. Out: `Scores` of the stock model in its own dtype and in fp32. Experts go through
their kernel's format first, as `ktc prove` has it: quantised and dequantised by the format's reference, or as decoded
where the checkpoint stores the format. Activations stay as they are, also where a kernel rounds them to 8 bits. The
whole model is in memory in fp32. Refused: what `ktc prove` refuses (N602, N604).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ktc.inference.consistency.scores import Scores, read
from ktc.model.compare.groups import OUTSIDE
from ktc.model.compare.opened import open_compiled, open_stock
from ktc.model.compare.quantised_baseline import formats_in, through_format
from ktc.model.compare.shown import Shown


@dataclass(frozen=True, slots=True)
class Stock:
    """Scores (N, T - 1) in the model's own dtype and in fp32, of the same weights."""

    model_dtype: Scores
    fp32: Scores


def stock_scores(
    out: Path, rows: Tensor, *, weights: Path | None = None, trusted: bool = False, shown: Shown | None = None
) -> Stock:
    """Return the scores of `rows` (N, T) int64, all in one call. Each begins with `shown`, if one is given.

    Raises:
        InputRefused: as `ktc.load` does; N602, N604.
    """
    opened = open_compiled(out, weights, trusted)
    model = open_stock(opened)
    for group in (OUTSIDE, *model.groups):
        model.load(group)
    for group in model.groups:
        for experts, form in formats_in(group, opened.manifest, opened.rows).items():
            stock = model.model.get_submodule(f"{group}.{experts.path}")
            through_format(stock, replace(form, integer_products=False))
    with torch.no_grad():
        fp32 = read(model.model, rows, shown=shown)
        for group in (OUTSIDE, *model.groups):
            model.to_own_dtype(group)
        return Stock(read(model.model, rows, shown=shown), fp32)
