"""Few rows times the plain matrices of their chosen experts, by Triton, where a GPU keeps them.

In: rows, the expert of each choice, and matrices as stock experts hold them. `activations` multiplies a token's row
with gate and up of an expert and computes the activation; `outputs` multiplies them with down, and adds a token's
results by their weights in the order of its choices. No rows are sorted and no weights are copied. Sums are in fp32 and
have one order: results are equal to the bit from run to run. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktc.model.experts.gpu.activation_kernels import constants_of_form, function, gated
from ktc.model.kernels.form import ExpertsForm


class Tile(NamedTuple):
    """The part of a matrix that a program multiplies: its rows, how many columns at once, and the program's warps."""

    rows: int
    columns: int
    warps: int


FIRST: Final = Tile(8, 512, 4)  # of gate, and as many of up
DOWN: Final = Tile(2, 512, 4)


def activations(
    x: Tensor, experts: Tensor, gate_up: Tensor, bias: Tensor | None, form: ExpertsForm, tile: Tile = FIRST
) -> Tensor:
    """Return what the activation makes of gate and up: `(T, H), (T * K,), (E, parts * I, H) -> (T * K, I)`.

    `bias` is (E, parts * I) in fp32. The result has the dtype of `x`, which is contiguous.
    """
    parts = 2 if form.gated else 1
    inner, pairs = gate_up.shape[1] // parts, len(experts)
    out = x.new_empty(pairs, inner)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _activations[(pairs, triton.cdiv(inner, tile.rows))](
            x, experts, gate_up, x if bias is None else bias, out, inner, x.shape[1], **constants_of_form(form),
            CHOICES=pairs // len(x), PARTS=parts, INTERLEAVED=form.interleaved, BIASED=bias is not None,
            ROWS=tile.rows, BLOCK=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return out


def outputs(
    h: Tensor, experts: Tensor, weights_TK: Tensor, down: Tensor, bias: Tensor | None, dtype: torch.dtype,
    tile: Tile = DOWN,
) -> Tensor:  # fmt: skip
    """Return the sums of a token's outputs by their weights: `(T * K, I), (T * K,), (T, K), (E, H, I) -> (T, H)`.

    `weights_TK` is contiguous, `bias` (E, H) in fp32, and the result of `dtype`.
    """
    tokens, choices = weights_TK.shape
    out = h.new_empty(tokens, down.shape[1], dtype=dtype)
    with torch.cuda.device_of(h):
        _outputs[(tokens, triton.cdiv(down.shape[1], tile.rows))](
            h, experts, weights_TK, down, h if bias is None else bias, out, down.shape[1], down.shape[2],
            CHOICES=choices, BIASED=bias is not None, ROWS=tile.rows, BLOCK=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return out


# Kernels -------------------------------------------------------------------------------------------------------------
@triton.jit
def _activations(
    x, experts, weights, bias, out, rows, columns,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, CHOICES: tl.constexpr, PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(experts + pair)
    first_row = row * 2 if INTERLEAVED else row
    to_up = 1 if INTERLEAVED else rows
    of_expert = weights + expert * (PARTS * rows) * columns
    of_token = x + (pair // CHOICES).to(tl.int64) * columns
    first = tl.zeros((ROWS, BLOCK), tl.float32)
    second = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(of_token + column, mask=column < columns, other=0).to(tl.float32)[None, :]
        there = (row < rows)[:, None] & (column < columns)[None, :]
        place = of_expert + first_row[:, None] * columns + column[None, :]
        first += tl.load(place, mask=there, other=0).to(tl.float32) * value
        if PARTS == 2:
            second += tl.load(place + to_up * columns, mask=there, other=0).to(tl.float32) * value
    gate, up = tl.sum(first, 1), tl.sum(second, 1)
    if BIASED:
        of_bias = bias + expert * (PARTS * rows) + first_row
        gate += tl.load(of_bias, mask=row < rows, other=0)
        if PARTS == 2:
            up += tl.load(of_bias + to_up, mask=row < rows, other=0)
    if PARTS == 2:
        h = gated(gate, up, FUNCTION, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
    else:
        h = function(gate, FUNCTION, ALPHA, GATE_CAP)
    tl.store(out + pair.to(tl.int64) * rows + row, h.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _outputs(
    h, experts, shares, weights, bias, out, rows, columns,
    CHOICES: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        for choice in tl.static_range(CHOICES):
            pair = token * CHOICES + choice
            value = tl.load(h + pair * columns + column, mask=column < columns, other=0).to(tl.float32)
            value = value * tl.load(shares + pair).to(tl.float32)
            of_expert = weights + tl.load(experts + pair) * rows * columns
            weight = tl.load(of_expert + row[:, None] * columns + column[None, :], mask=there, other=0)
            sums += weight.to(tl.float32) * value[None, :]
    total = tl.sum(sums, 1)
    if BIASED:
        for choice in tl.static_range(CHOICES):
            pair = token * CHOICES + choice
            of_bias = bias + tl.load(experts + pair) * rows + row
            total += tl.load(of_bias, mask=row < rows, other=0) * tl.load(shares + pair).to(tl.float32)
    tl.store(out + token.to(tl.int64) * rows + row, total.to(out.dtype.element_ty), mask=row < rows)
