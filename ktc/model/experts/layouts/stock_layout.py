"""Stock experts taken apart: one expert's tensors, as its form stores them, become the matrices that kernels pack.

The one place that knows what `transposed` and `interleaved` mean for data; the loader, the proofs and `realise` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, cast

import torch
from torch import Tensor

from ktc.model.checkpoint import Span
from ktc.model.kernels.form import ExpertPart, ExpertsForm

StockTensor = Literal["gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"]


def stock_names(form: ExpertsForm) -> tuple[StockTensor, ...]:
    """Return the names of the tensors in a stock experts module of this form: weights, then their biases."""
    gate_up: StockTensor = "gate_up_proj" if form.gated else "up_proj"
    if not form.biased:
        return gate_up, "down_proj"
    return gate_up, "down_proj", cast("StockTensor", f"{gate_up}_bias"), "down_proj_bias"


def stock_shape(
    form: ExpertsForm, name: StockTensor, num_experts: int, hidden: int, intermediate: int
) -> tuple[int, ...]:
    """Return the shape of one of these tensors in the stock module."""
    rows = {"gate_up_proj": 2 * intermediate, "up_proj": intermediate, "down_proj": hidden}[name.removesuffix("_bias")]
    if name.endswith("_bias"):
        return num_experts, rows
    columns = intermediate if name == "down_proj" else hidden
    return (num_experts, columns, rows) if form.transposed else (num_experts, rows, columns)


def stock_tensors(
    form: ExpertsForm, sizes: tuple[int, int, int], parts: Collection[str], matrices: Callable[[str], Tensor]
) -> dict[StockTensor, Tensor]:
    """Return the stock tensors of `form`, of experts, H and I in `sizes`.

    `matrices` returns a part of all experts as (E, outputs, inputs), a bias as (E, outputs). Gate and up are joined
    where `gate_up` is not among the `parts`. Raises `ValueError` for other sizes, and where `matrices` fails.
    """

    def whole(name: StockTensor) -> Tensor:
        part = name.replace("_proj", "")
        if part in parts or not part.startswith("gate_up"):
            tensor = matrices(part)
        else:
            tensor = torch.cat([matrices(part.replace("gate_up", half)) for half in ("gate", "up")], 1)
        tensor = tensor.transpose(1, 2) if form.transposed and tensor.dim() == 3 else tensor
        if tuple(tensor.shape) != stock_shape(form, name, *sizes):
            raise ValueError(f"its experts are of other sizes: `{name}` {list(tensor.shape)}")
        return tensor

    try:
        return {name: whole(name) for name in stock_names(form)}
    except (AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error


def half_of(form: ExpertsForm, name: StockTensor, part: str, intermediate: int) -> tuple[Span, int]:
    """Return the span of the stock tensor `name` that gate or up fills, and its stride."""
    dim = 2 if form.transposed and not name.endswith("_bias") else 1
    second = part.startswith("up")
    if form.interleaved:
        return Span(dim, int(second), intermediate), 2
    return Span(dim, intermediate if second else 0, intermediate), 1


def canonical_parts(form: ExpertsForm, name: StockTensor, tensor: Tensor) -> Iterator[tuple[ExpertPart, Tensor]]:
    """Yield the parts in one expert's slice of the stock tensor `name`.

    Gate and up are (I, H), down is (H, I), biases have their rows. The results are views wherever the form allows it.
    """
    is_bias = name.endswith("_bias")
    rows = tensor if is_bias or not form.transposed else tensor.transpose(0, 1)
    suffix = "_bias" if is_bias else ""
    if not name.startswith("gate_up"):
        yield cast("ExpertPart", name.split("_")[0] + suffix), rows
        return
    gate, up = (rows[0::2], rows[1::2]) if form.interleaved else rows.chunk(2)
    yield cast("ExpertPart", f"gate{suffix}"), gate
    yield cast("ExpertPart", f"up{suffix}"), up


def parts_of(form: ExpertsForm) -> tuple[ExpertPart, ...]:
    """Return every part that an expert of this form needs, weights before biases."""
    weights: tuple[ExpertPart, ...] = ("gate", "up", "down") if form.gated else ("up", "down")
    return (*weights, *(cast("ExpertPart", f"{w}_bias") for w in weights)) if form.biased else weights
