"""The steps of a chunk of experts beside grouped products, by Triton: each kernel reads and writes its rows once.

In: rows sorted by expert, and where the rows of each expert end. `gathered` copies the rows of tokens and multiplies
them with LoRA's narrow factor on the way. `activated` adds LoRA's product to gate and up, computes the activation, and
multiplies it with the narrow factor of down. `activated_backward` does the same backward, with both gradients of narrow
values and those of routing weights. `summed` adds the rows of each token. Arithmetic is in fp32; a tile has the rows of
one expert. Sums have one order: results are equal to the bit from run to run. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktc.model.experts.gpu.activation_kernels import (
    constants_of_form,
    function,
    function_and_slope,
    gated,
    gated_and_slopes,
)
from ktc.model.experts.gpu.coded_kernels import tile_of_rows
from ktc.model.experts.gpu.row_factors import ActivationGradients, BothFactors, GivenGradients, Inner, RunFactors
from ktc.model.experts.gpu.slots import Rows
from ktc.model.kernels.form import ExpertsForm

_INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)
_NARROWEST: Final = 16  # columns of a product of tiles


class Tile(NamedTuple):
    """The part of the rows that a program has: how many, how many columns at once, and the program's warps."""

    rows: int
    columns: int
    warps: int


GATHERED: Final = Tile(64, 128, 4)
ADAPTED: Final = Tile(64, 64, 4)  # with LoRA's products: their factors are read once for more rows
PLAIN: Final = Tile(16, 256, 4)
OUTER: Final = Tile(64, 128, 4)


def gathered(
    x: Tensor, rows: Rows, factors: RunFactors | None, *, by_b: bool = False, tile: Tile = GATHERED
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of tokens and their products with A, or with the transpose of B: `(T, C) -> (S, C), (S, r)`."""
    if factors is None:
        return x.index_select(0, rows.tokens), None
    x, columns, rank = x.contiguous(), x.shape[1], factors.rank
    out, low = x.new_empty(len(rows.tokens), columns), x.new_empty(len(rows.tokens), rank)
    factor = factors.b if by_b else factors.a.transpose(1, 2)  # (G, C, r)
    bits = None if by_b else factors.bits
    given = (
        x, rows.tokens, rows.ends, factor, *_or(x, bits), out, low, len(rows.ends), columns, *factor.stride(),
    )  # fmt: skip
    _launch(_gathered, rows, tile, given, RANK=rank, LANES=_lanes(rank), DROPS=bits is not None)
    return out, low


def activated(
    form: ExpertsForm, inner: Inner, factors: BothFactors, rows: Rows, *, padding: int = 0, tile: Tile | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the activation and its product with A of down, `(S, I), (S, r)`.

    With `padding`, both are parts of one tensor, the second behind the first, in rows of `padding` more values.
    """
    product, (_, down) = inner.product, factors
    size, columns = len(product), product.shape[1] // (2 if form.gated else 1)
    h, down_low = _beside(product, columns, down, padding)
    constants, read = _inputs(form, inner, factors)
    given = (*read, h, *_or(product, down_low), rows.ends, len(rows.ends), columns, *_strides(h, down_low))
    assert size == len(rows.tokens), "a row for each slot"
    _launch(_activated, rows, tile or _tile(factors), given, **constants)
    return h, down_low


def activated_backward(
    form: ExpertsForm, inner: Inner, factors: BothFactors, rows: Rows, given: GivenGradients, *, padding: int = 0,
    tile: Tile | None = None,
) -> ActivationGradients:  # fmt: skip
    """Return the gradients of gate and up, and what those of factors are made of.

    With `padding`, `d_low` is behind `d_inner` in one tensor, in rows of `padding` more values.
    """
    product, (first, down) = inner.product, factors
    d_h, weights = given.d_h.contiguous(), given.weights.contiguous()
    d_down_low = None if given.d_down_low is None else given.d_down_low.contiguous()
    d_inner, d_low = _beside(product, product.shape[1], first, padding)
    h = weighted = d_weighted = None
    if down is not None:
        h = torch.empty_like(d_h)
        weighted, d_weighted = (product.new_empty(len(product), down.rank) for _ in range(2))
    d_weights = product.new_empty(len(product), dtype=torch.float32)
    constants, read = _inputs(form, inner, factors)
    arguments = (
        *read, d_h, *_or(product, d_down_low), weights, d_inner, *_or(product, d_low, h, weighted, d_weighted),
        d_weights, rows.ends, len(rows.ends), d_h.shape[1], *_strides(d_inner, d_low),
    )  # fmt: skip
    _launch(_activated_backward, rows, tile or _tile(factors), arguments, **constants)
    return ActivationGradients(h, d_inner, d_low, d_weights, weighted, d_weighted)


def put_outer(target: Tensor, narrow: Tensor, wide: Tensor, rows: Rows, scale: float, *, tile: Tile = OUTER) -> None:
    """Put the sums of outer products of each expert's rows to `target`: `(S, r), (S, C) -> (G, rank, C)`, times scale.

    The target may have any strides. Lanes beyond its rank are left out.
    """
    groups, rank, columns = target.shape
    assert narrow.stride(1) == wide.stride(1) == 1, "rows in one piece"
    with torch.cuda.device_of(target):  # Triton launches on the current device
        _outer[(groups, triton.cdiv(columns, tile.columns))](
            target, narrow, wide, rows.ends, scale, columns, narrow.stride(0), wide.stride(0), *target.stride(),
            RANK=rank, LANES=_lanes(rank), BM=tile.rows, BLOCK=tile.columns, num_warps=tile.warps,
        )  # fmt: skip


def _or(other: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return tensors, and any other for those that a kernel does not read."""
    return tuple(other if tensor is None else tensor for tensor in tensors)


def _lanes(rank: int) -> int:
    return max(_NARROWEST, triton.next_power_of_2(rank))


def _beside(like: Tensor, columns: int, factors: RunFactors | None, padding: int) -> tuple[Tensor, Tensor | None]:
    """Allocate rows of `columns`, and narrow ones: with `padding` behind them."""
    if factors is None or not padding:
        return like.new_empty(len(like), columns), factors and like.new_empty(len(like), factors.rank)
    assert factors.rank <= padding, "a narrow row is behind each row"
    whole = like.new_empty(len(like), columns + padding)
    return whole[:, :columns], whole[:, columns : columns + factors.rank]


def _strides(rows: Tensor, narrow: Tensor | None) -> tuple[int, int]:
    return rows.stride(0), 0 if narrow is None else narrow.stride(0)


def _inputs(form: ExpertsForm, inner: Inner, factors: BothFactors) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the constants of a kernel, and what it makes gate and up of."""
    (product, low, bias), (first, down) = inner, factors
    assert product.is_contiguous() and (low is None) == (first is None), "whole rows, and narrow ones with a factor"
    bits = None if down is None else down.bits
    of_first, of_down = (0 if of_product is None else of_product.rank for of_product in factors)
    constants = {
        **constants_of_form(form), "PARTS": 2 if form.gated else 1, "INTERLEAVED": form.interleaved,
        "BIASED": bias is not None, "RANK": of_first, "LANES": _lanes(of_first), "DOWN_RANK": of_down,
        "DOWN_LANES": _lanes(of_down), "DROPS": bits is not None,
    }  # fmt: skip
    bias = None if bias is None else bias.contiguous()
    return constants, (product, *_or(product, low, first and first.b, bias, down and down.a, bits))


def _tile(factors: BothFactors) -> Tile:
    return PLAIN if factors == (None, None) else ADAPTED


def _launch(kernel: Any, rows: Rows, tile: Tile, given: tuple[Any, ...], **constants: Any) -> None:
    """Launch a program for each tile of rows of one expert."""
    size, groups = len(rows.tokens), len(rows.ends)
    if size:
        experts = max(128, triton.next_power_of_2(groups))  # few lengths, since a kernel is compiled for each
        tiles = triton.cdiv(size, tile.rows) + min(groups, size)  # at most
        with torch.cuda.device_of(rows.ends):  # Triton launches on the current device
            kernel[(tiles,)](
                *given, **constants, EXPERTS=experts, BM=tile.rows, BLOCK=tile.columns, num_warps=tile.warps
            )


# Parts of kernels ----------------------------------------------------------------------------------------------------
@triton.jit
def _product(left, right, sums):
    """Return `sums + left @ right`."""
    if _INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(left, right, sums)


@triton.jit
def _kept(values, bits, row, column, columns, there):
    """Return the values that are kept, and zero for those that are dropped."""
    place = row.to(tl.int64)[:, None] * ((columns + 7) // 8) + (column // 8)[None, :]
    byte = tl.load(bits + place, mask=there, other=0).to(tl.int32)
    return tl.where((byte >> (column % 8)[None, :] & 1) != 0, values, 0.0)


@triton.jit
def _narrow(values, row, there, lane, RANK: tl.constexpr):
    """Return narrow rows, with zeros for lanes beyond their rank."""
    place = row.to(tl.int64)[:, None] * RANK + lane[None, :]
    return tl.load(values + place, mask=there[:, None] & (lane < RANK)[None, :], other=0)


@triton.jit
def _wide(factor, expert, column, columns, lane, RANK: tl.constexpr, TURNED: tl.constexpr):
    """Return a tile of A, stored (G, r, C): (lanes, columns), or TURNED (columns, lanes)."""
    of_expert = factor + expert.to(tl.int64) * RANK * columns
    if TURNED:
        place = lane[None, :] * columns + column[:, None]
        return tl.load(of_expert + place, mask=(lane < RANK)[None, :] & (column < columns)[:, None], other=0)
    else:
        place = lane[:, None] * columns + column[None, :]
        return tl.load(of_expert + place, mask=(lane < RANK)[:, None] & (column < columns)[None, :], other=0)


@triton.jit
def _tall(factor, expert, output, there, outputs, lane, RANK: tl.constexpr, TURNED: tl.constexpr):
    """Return a tile of B, stored (G, C, r): (outputs, lanes), or TURNED (lanes, outputs)."""
    of_expert = factor + expert.to(tl.int64) * RANK * outputs
    if TURNED:
        place = output[None, :] * RANK + lane[:, None]
        return tl.load(of_expert + place, mask=(lane < RANK)[:, None] & there[None, :], other=0)
    else:
        place = output[:, None] * RANK + lane[None, :]
        return tl.load(of_expert + place, mask=(lane < RANK)[None, :] & there[:, None], other=0)


@triton.jit
def _gate_and_up(
    inner, narrow, of_lora, bias, expert, row, there, begin, columns, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BIASED: tl.constexpr, RANK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return gate and up of rows in fp32, with LoRA's product and the bias; without a gate, up twice."""
    column, lane = begin + tl.arange(0, BLOCK), tl.arange(0, LANES)
    inside, known = there[:, None] & (column < columns)[None, :], column < columns
    first_row = column * 2 if INTERLEAVED else column
    up_row = first_row + (1 if INTERLEAVED else columns) if PARTS == 2 else first_row
    of_row = inner + row.to(tl.int64)[:, None] * (PARTS * columns)
    if INTERLEAVED:
        both = begin * 2 + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(of_row + both[None, :], mask=there[:, None] & (both < 2 * columns)[None, :], other=0)
        gate, up = tl.split(tl.reshape(pairs.to(tl.float32), (row.shape[0], BLOCK, 2)))
    else:
        gate = tl.load(of_row + column[None, :], mask=inside, other=0).to(tl.float32)
        up = gate
        if PARTS == 2:
            up = tl.load(of_row + columns + column[None, :], mask=inside, other=0).to(tl.float32)
    if RANK > 0:
        gate = _product(narrow, _tall(of_lora, expert, first_row, known, PARTS * columns, lane, RANK, True), gate)
        if PARTS == 2:
            up = _product(narrow, _tall(of_lora, expert, up_row, known, PARTS * columns, lane, RANK, True), up)
    if BIASED:
        of_bias = bias + expert * (PARTS * columns)
        gate += tl.load(of_bias + first_row, mask=known, other=0).to(tl.float32)[None, :]
        if PARTS == 2:
            up += tl.load(of_bias + up_row, mask=known, other=0).to(tl.float32)[None, :]
    return gate, up


@triton.jit
def _adapted_down(
    h, grad, d_narrow, of_down, bits, h_out, sums, expert, row, column, columns, inside,
    RANK: tl.constexpr, LANES: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Store what A of down reads, and return the whole gradient of `h` and the sums of A's product."""
    lane = tl.arange(0, LANES)
    added = tl.zeros((grad.shape[0], grad.shape[1]), tl.float32)
    added = _product(d_narrow, _wide(of_down, expert, column, columns, lane, RANK, False), added)
    read = h.to(h_out.dtype.element_ty)
    if DROPS:
        added = _kept(added, bits, row, column, columns, inside)
        read = _kept(read, bits, row, column, columns, inside).to(h_out.dtype.element_ty)
    tl.store(h_out + row.to(tl.int64)[:, None] * columns + column[None, :], read, mask=inside)
    return grad + added, _product(read, _wide(of_down, expert, column, columns, lane, RANK, True), sums)


@triton.jit
def _store_parts(of_row, d_gate, d_up, there, begin, columns, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store the gradients of gate and up as their products are ordered."""
    BLOCK: tl.constexpr = d_gate.shape[1]
    column = begin + tl.arange(0, BLOCK)
    inside = there[:, None] & (column < columns)[None, :]
    if INTERLEAVED:
        both = begin * 2 + tl.arange(0, 2 * BLOCK)
        pairs = tl.reshape(tl.join(d_gate, d_up), (d_gate.shape[0], 2 * BLOCK))
        tl.store(of_row + both[None, :], pairs, mask=there[:, None] & (both < 2 * columns)[None, :])
    else:
        tl.store(of_row + column[None, :], d_gate, mask=inside)
        if PARTS == 2:
            tl.store(of_row + columns + column[None, :], d_up, mask=inside)


@triton.jit
def _store_narrow(target, values, row, there, lane, stride, RANK: tl.constexpr):
    place = row.to(tl.int64)[:, None] * stride + lane[None, :]
    tl.store(target + place, values.to(target.dtype.element_ty), mask=there[:, None] & (lane < RANK)[None, :])


# Kernels -------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["experts"])
def _gathered(
    x, tokens, ends, factor, bits, out, low, experts, columns, of_expert, of_column, of_lane,
    RANK: tl.constexpr, LANES: tl.constexpr, DROPS: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    expert, start, end = tile_of_rows(ends, experts, tl.program_id(0), EXPERTS, BM)
    if expert >= experts:
        return
    row, lane = start + tl.arange(0, BM), tl.arange(0, LANES)
    there = row < end
    token = tl.load(tokens + row, mask=there, other=0)
    source, target = x + token[:, None] * columns, out + row.to(tl.int64)[:, None] * columns
    of_factor = factor + expert.to(tl.int64) * of_expert
    sums = tl.zeros((BM, LANES), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = there[:, None] & (column < columns)[None, :]
        values = tl.load(source + column[None, :], mask=inside, other=0)
        tl.store(target + column[None, :], values, mask=inside)
        if DROPS:
            values = _kept(values, bits, row, column, columns, inside).to(x.dtype.element_ty)
        place = column[:, None] * of_column + lane[None, :] * of_lane
        weights = tl.load(of_factor + place, mask=(column < columns)[:, None] & (lane < RANK)[None, :], other=0)
        sums = _product(values, weights, sums)
    _store_narrow(low, sums, row, there, lane, RANK, RANK)


@triton.jit(do_not_specialize=["experts"])
def _activated(
    inner, low, of_lora, bias, of_down, bits, out, down_low, ends, experts, columns, out_stride, low_stride,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, RANK: tl.constexpr,
    LANES: tl.constexpr, DOWN_RANK: tl.constexpr, DOWN_LANES: tl.constexpr, DROPS: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, start, end = tile_of_rows(ends, experts, tl.program_id(0), EXPERTS, BM)
    if expert >= experts:
        return
    row, lane, down_lane = start + tl.arange(0, BM), tl.arange(0, LANES), tl.arange(0, DOWN_LANES)
    there = row < end
    kind: tl.constexpr = out.dtype.element_ty
    narrow = _narrow(low, row, there, lane, RANK)
    sums = tl.zeros((BM, DOWN_LANES), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = there[:, None] & (column < columns)[None, :]
        gate, up = _gate_and_up(
            inner, narrow, of_lora, bias, expert, row, there, begin, columns,
            PARTS, INTERLEAVED, BIASED, RANK, LANES, BLOCK,
        )  # fmt: skip
        if PARTS == 2:
            h = gated(gate, up, FUNCTION, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
        else:
            h = function(gate, FUNCTION, ALPHA, GATE_CAP)
        h = h.to(kind)
        tl.store(out + row.to(tl.int64)[:, None] * out_stride + column[None, :], h, mask=inside)
        if DOWN_RANK > 0:
            if DROPS:
                h = _kept(h, bits, row, column, columns, inside).to(kind)
            sums = _product(h, _wide(of_down, expert, column, columns, down_lane, DOWN_RANK, True), sums)
    if DOWN_RANK > 0:
        _store_narrow(down_low, sums, row, there, down_lane, low_stride, DOWN_RANK)


@triton.jit(do_not_specialize=["experts"])
def _activated_backward(
    inner, low, of_lora, bias, of_down, bits, d_h, d_down_low, weights, d_inner, d_low, h_out, weighted, d_weighted,
    d_weights, ends, experts, columns, out_stride, low_stride,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, RANK: tl.constexpr,
    LANES: tl.constexpr, DOWN_RANK: tl.constexpr, DOWN_LANES: tl.constexpr, DROPS: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, start, end = tile_of_rows(ends, experts, tl.program_id(0), EXPERTS, BM)
    if expert >= experts:
        return
    row, lane, down_lane = start + tl.arange(0, BM), tl.arange(0, LANES), tl.arange(0, DOWN_LANES)
    there = row < end
    wide_row = row.to(tl.int64)[:, None]
    kind: tl.constexpr = d_inner.dtype.element_ty
    narrow = _narrow(low, row, there, lane, RANK)
    d_narrow = _narrow(d_down_low, row, there, down_lane, DOWN_RANK)
    weight = tl.load(weights + row, mask=there, other=0).to(tl.float32)
    of_weight = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, LANES), tl.float32)
    down_sums = tl.zeros((BM, DOWN_LANES), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        known = column < columns
        inside = there[:, None] & known[None, :]
        gate, up = _gate_and_up(
            inner, narrow, of_lora, bias, expert, row, there, begin, columns,
            PARTS, INTERLEAVED, BIASED, RANK, LANES, BLOCK,
        )  # fmt: skip
        if PARTS == 2:
            h, by_gate, by_up = gated_and_slopes(gate, up, FUNCTION, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
        else:
            h, by_gate = function_and_slope(gate, FUNCTION, ALPHA, GATE_CAP)
            by_up = by_gate
        grad = tl.load(d_h + wide_row * columns + column[None, :], mask=inside, other=0).to(tl.float32)
        if DOWN_RANK > 0:
            grad, down_sums = _adapted_down(
                h, grad, d_narrow, of_down, bits, h_out, down_sums, expert, row, column, columns, inside,
                DOWN_RANK, DOWN_LANES, DROPS,
            )  # fmt: skip
        of_weight += tl.sum(tl.where(inside, h * grad, 0.0), 1)
        grad = grad * weight[:, None]
        d_gate = (grad * by_gate).to(kind)
        d_up = (grad * by_up).to(kind) if PARTS == 2 else d_gate
        _store_parts(d_inner + wide_row * out_stride, d_gate, d_up, there, begin, columns, PARTS, INTERLEAVED)
        if RANK > 0:
            first_row = column * 2 if INTERLEAVED else column
            sums = _product(d_gate, _tall(of_lora, expert, first_row, known, PARTS * columns, lane, RANK, False), sums)
            if PARTS == 2:
                up_row = first_row + (1 if INTERLEAVED else columns)
                sums = _product(d_up, _tall(of_lora, expert, up_row, known, PARTS * columns, lane, RANK, False), sums)
    tl.store(d_weights + row, of_weight, mask=there)
    if RANK > 0:
        _store_narrow(d_low, sums, row, there, lane, low_stride, RANK)
    if DOWN_RANK > 0:
        of_rows = weight.to(kind).to(tl.float32)[:, None]
        _store_narrow(
            weighted, down_sums.to(kind).to(tl.float32) * of_rows, row, there, down_lane, DOWN_RANK, DOWN_RANK
        )
        _store_narrow(d_weighted, d_narrow.to(tl.float32) * of_rows, row, there, down_lane, DOWN_RANK, DOWN_RANK)


@triton.jit
def _outer(
    target, narrow, wide, ends, scale, columns, narrow_stride, wide_stride, of_expert, of_lane, of_column,
    RANK: tl.constexpr, LANES: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    start, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    column, lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LANES)
    known, stored = column < columns, lane < RANK
    sums = tl.zeros((LANES, BLOCK), tl.float32)
    for first in range(start, end, BM):
        row = first + tl.arange(0, BM)
        there, row = row < end, row.to(tl.int64)
        values = tl.load(
            wide + row[:, None] * wide_stride + column[None, :], mask=there[:, None] & known[None, :], other=0
        )
        place = narrow + row[None, :] * narrow_stride + lane[:, None]
        sums = _product(tl.load(place, mask=there[None, :] & stored[:, None], other=0), values, sums)
    place = expert.to(tl.int64) * of_expert + lane[:, None] * of_lane + column[None, :].to(tl.int64) * of_column
    tl.store(target + place, (sums * scale).to(target.dtype.element_ty), mask=stored[:, None] & known[None, :])
