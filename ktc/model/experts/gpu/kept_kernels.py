"""Experts of few rows by their addresses, by Triton: in memory of the GPU, or in pinned memory of the host.

In: the choices of a layer, and a table with the address of each expert that the GPU keeps. `split` gives each choice
the address that the GPU reads its expert from, or none. `activations` and `products` multiply each row with the panels
at its address, as `coded_kernels.py` does, or by tensor cores (`nibble_kernels.py`). `sum_of_choices` adds a token's
results in the order of its choices. Tables and shares are read when a kernel runs, so a CUDA graph follows their
changes. Results are equal to the bit from run to run. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktc.model.experts.gpu.activation_kernels import constants_of_form, function, gated
from ktc.model.experts.gpu.address_kernels import NO_BIAS, PARTS, Places, Side, address_of, beginning_of, units_of
from ktc.model.experts.gpu.coded_kernels import constants_of, panel_sums, row_of
from ktc.model.experts.layouts.coded_matrices import CodedMatrices, addressed_codes
from ktc.model.experts.layouts.panel_codes import Cuts, Numbers
from ktc.model.experts.references.kept_split import FIRST_UNIT_BIT, WHOLE_SHARE
from ktc.model.kernels.form import ExpertsForm
from ktc.model.kernels.triton_support import has_gluon

_WORDS: Final[dict[Numbers, str]] = {"int8": "byte", "e4m3": "byte", "bf16": "weight"}  # others are of 16 bits
_SUMMED: Final = 256  # outputs of a program
_ACTIVATED: Final = 512
_WHOLE: Final = tl.constexpr(WHOLE_SHARE)
_UNIT_BIT: Final = tl.constexpr(FIRST_UNIT_BIT)


def split(
    index_TK: Tensor, table: Tensor, share: Tensor, counts: Tensor, traffic: Tensor, packed: tuple[int, int], cuts: Cuts
) -> tuple[Tensor, Tensor]:
    """Divide the chosen experts of a layer among GPU memory, bus and CPU: see `kept_split.split`.

    Add each chosen expert to `counts` (E,) int32, and to `traffic` (3,) int64 how many units were read where. `table`
    (E,) is int64, `share` (3,) int32; `packed` are the address of the layer's experts and the bytes of each, multiples
    of 16.
    """
    addresses, left = index_TK.new_empty(index_TK.numel()), torch.empty_like(index_TK)
    with torch.cuda.device_of(index_TK):
        _split[(1,)](
            index_TK, table, share, counts, traffic, addresses, left, *packed, index_TK.numel(), len(table),
            cuts.units, cuts.step,
            EXPERTS=triton.next_power_of_2(len(table)), PAIRS=triton.next_power_of_2(index_TK.numel()),
        )  # fmt: skip
    return addresses, left


def products(
    rows: Tensor, places: Places, matrices: CodedMatrices, *, per_row: int = 1, bias_at: int = NO_BIAS,
    side: Side = "columns",
) -> Tensor:  # fmt: skip
    """Multiply rows with matrices at addresses: `(P / per_row, K), P places -> (parts, P, N)` in fp32.

    The products are the sums of the parts. `matrices` says where they are within an expert, and its bytes are not read.
    `bias_at` is the first byte of a bias in fp32. Rows without an address are left undefined, and outputs of units that
    are not computed from an address, where `side` is that of rows.
    """
    if (by_nibbles := _by_nibbles(rows, matrices)) is not None:
        return by_nibbles.products(rows, places, matrices, per_row=per_row, bias_at=bias_at, side=side)
    codes = addressed_codes(matrices.panels)
    assert codes is not None, "panels that a GPU multiplies"
    out = torch.empty(1, len(places.experts), matrices.shape[1], dtype=torch.float32, device=rows.device)
    with torch.cuda.device_of(rows):
        _products[(matrices.num_panels, len(places.experts))](
            rows, *places.given, out, matrices.begin, matrices.panel_bytes, matrices.rows, matrices.columns,
            max(bias_at, 0), places.step, **constants_of(codes), PARTS=matrices.parts, INTERLEAVED=matrices.interleaved,
            WORD=_WORDS.get(codes.numbers, "short"), PER_ROW=per_row, TABLE=places.table is not None,
            BIASED=bias_at != NO_BIAS, CUT=places.cut(side), BLOCKS=8, num_warps=4,
        )  # fmt: skip
    return out


def activations(
    rows: Tensor, places: Places, matrices: CodedMatrices, form: ExpertsForm, *, per_row: int, bias_at: int = NO_BIAS
) -> Tensor:
    """Return what the activation makes of gate and up: `(P / per_row, H), P places -> (P, I)` in bf16.

    Sums are in fp32, as is the activation, and rounded once. Rows without an address are left undefined, and units that
    are not computed from an address.
    """
    if (by_nibbles := _by_nibbles(rows, matrices)) is not None:
        return by_nibbles.activations(rows, places, matrices, form, per_row=per_row, bias_at=bias_at)
    inner = products(rows, places, matrices, per_row=per_row, bias_at=bias_at, side="rows")
    out = torch.empty(len(places.experts), matrices.rows, dtype=torch.bfloat16, device=rows.device)
    with torch.cuda.device_of(rows):
        _activations[(triton.cdiv(matrices.rows, _ACTIVATED), len(places.experts))](
            inner, *places.given, out, matrices.rows, places.step, **constants_of_form(form), PARTS=matrices.parts,
            INTERLEAVED=matrices.interleaved, TABLE=places.table is not None, CUT=places.cut("rows"), BLOCK=_ACTIVATED,
        )  # fmt: skip
    return out


def sum_of_choices(rows: Tensor, places: Places, weights_TK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Add the rows of each token that have an address, with their weights: `(parts, T * K, H), (T, K) -> (T, H)`."""
    tokens, (parts, pairs, hidden) = len(weights_TK), rows.shape
    out = torch.empty(tokens, hidden, dtype=dtype, device=rows.device)
    with torch.cuda.device_of(rows):
        _sum_of_choices[(triton.cdiv(hidden, _SUMMED), tokens)](
            rows, places.experts, weights_TK, out, hidden, pairs * hidden, CHOICES=weights_TK.shape[1], ROW_PARTS=parts,
            TABLE=places.table is not None, BLOCK=_SUMMED,
        )  # fmt: skip
    return out


def _by_nibbles(rows: Tensor, matrices: CodedMatrices) -> ModuleType | None:
    """Return the kernels in Gluon, None where they do not serve."""
    if not has_gluon():
        return None
    from ktc.model.experts.gpu import nibble_kernels

    return nibble_kernels if nibble_kernels.serves(rows, matrices) else None


# Kernels -------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["host", "pairs", "experts", "units", "step"])
def _split(
    index, table, share, counts, traffic, addresses, left, host, nbytes, pairs, experts, units, step,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    expert, pair = tl.arange(0, EXPERTS), tl.arange(0, PAIRS)
    known, is_pair = expert < experts, pair < pairs
    chosen = tl.load(index + pair, mask=is_pair, other=-1)
    is_of = ((chosen[:, None] == expert[None, :]) & known[None, :]).to(tl.int32)  # (PAIRS, EXPERTS)
    is_chosen = tl.max(is_of, 0)
    kept = tl.load(table + expert, mask=known, other=0)
    missing = tl.where(kept == 0, is_chosen, 0)
    misses = tl.sum(missing, 0)
    parts = (units + step - 1) // step
    most, lead = misses * parts, tl.load(share + 1) * parts
    over_bus = tl.minimum(((most + 1) * tl.load(share) + lead) // _WHOLE, most)  # `kept_split.over_bus`
    over_bus = tl.where((most - over_bus) * _WHOLE < tl.load(share + 2) * parts, most, over_bus)
    whole, rest, order = over_bus // parts, over_bus % parts, tl.cumsum(missing, 0)
    taken = tl.where(order == whole + 1, rest, 0)
    sent = (missing == 1) & ((order <= whole) | (taken > 0))
    place = tl.where(sent, host + expert.to(tl.int64) * nbytes + taken, kept)
    address = tl.sum(tl.where(is_of == 1, place[None, :], 0), 1)
    tl.store(addresses + pair, address, mask=is_pair)
    is_wrong = (chosen < 0) | (chosen >> _UNIT_BIT != 0)  # an error of the CPU's, as any other wrong number
    for_cpu = tl.where(is_wrong, experts.to(tl.int64), chosen)
    later = tl.where((address & PARTS) != 0, chosen + ((address & PARTS) * step << _UNIT_BIT), -1)
    tl.store(left + pair, tl.where(address != 0, later, for_cpu), mask=is_pair)
    tl.store(counts + expert, tl.load(counts + expert, mask=known, other=0) + is_chosen, mask=known)
    hits, by_bus = tl.sum(is_chosen, 0) - misses, whole * units + rest * step
    tl.store(traffic, tl.load(traffic) + hits * units)
    tl.store(traffic + 1, tl.load(traffic + 1) + by_bus)
    tl.store(traffic + 2, tl.load(traffic + 2) + misses * units - by_bus)


@triton.jit
def _as_words(base, WORD: tl.constexpr):
    """Return an address as a pointer to codes or weights."""
    if WORD == "byte":
        return tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)
    elif WORD == "weight":
        return tl.multiple_of(base.to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        return tl.multiple_of(base.to(tl.pointer_type(tl.int16)), 16)


@triton.jit
def _as_scales(base, SCALES: tl.constexpr):
    """Return an address as a pointer to the numbers that scales begin with."""
    if SCALES == "bf16":
        return tl.multiple_of(base.to(tl.pointer_type(tl.bfloat16)), 16)
    elif SCALES == "fp32" or SCALES == "float8":
        return tl.multiple_of(base.to(tl.pointer_type(tl.float32)), 16)
    elif SCALES == "zero":
        return tl.multiple_of(base.to(tl.pointer_type(tl.int32)), 16)
    elif SCALES == "power":
        return tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)
    else:
        return tl.multiple_of(base.to(tl.pointer_type(tl.float16)), 16)


@triton.jit
def _stored(out, bias, sums, lane, panel, rows, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr):
    """Store the sums of a panel's outputs `lane`, with their bias."""
    of_lane, is_row = row_of(lane, panel, rows, PARTS, INTERLEAVED)
    if BIASED:
        sums += tl.load(bias + panel * 32 + lane, mask=is_row, other=0)
    tl.store(out + of_lane, sums, mask=is_row)


@triton.jit(do_not_specialize=["bias_at", "count"])
def _products(
    x, experts, table, count, out, first, panel_bytes, rows, columns, bias_at, step,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    WORD: tl.constexpr, PER_ROW: tl.constexpr, TABLE: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    panel, pair = tl.program_id(0), tl.program_id(1)
    place = address_of(experts, table, pair, count, TABLE)
    is_left = place == 0
    if CUT == "rows":
        is_left |= panel * (32 // PARTS) >= units_of(place, rows, step)
    if is_left:
        return
    base = place if CUT is None else beginning_of(place)
    summed = units_of(place, columns, step) if CUT == "columns" else columns
    row = x + (pair // PER_ROW).to(tl.int64) * columns
    factors = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)
    lower, upper = panel_sums(
        row, _as_words(base, WORD), _as_scales(base, SCALES), factors, first + panel * panel_bytes, summed,
        NUMBERS, SCALES, LEAST, GROUP, SPAN, NEIGHBOURS, HEAD, NBYTES, SCALE, BLOCKS,
    )  # fmt: skip
    result = out + pair.to(tl.int64) * PARTS * rows
    bias = (base + bias_at).to(tl.pointer_type(tl.float32))
    if WORD == "short":
        _stored(result, bias, lower, tl.arange(0, 16), panel, rows, PARTS, INTERLEAVED, BIASED)
        _stored(result, bias, upper, tl.arange(0, 16) + 16, panel, rows, PARTS, INTERLEAVED, BIASED)
    else:
        _stored(result, bias, lower, tl.arange(0, 32), panel, rows, PARTS, INTERLEAVED, BIASED)


@triton.jit(do_not_specialize=["count"])
def _activations(
    inner, experts, table, count, out, columns, step,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    TABLE: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair, column = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = address_of(experts, table, pair, count, TABLE)
    if place == 0:
        return
    of_pair, known = inner + pair.to(tl.int64) * (PARTS * columns), column < columns
    if CUT is not None:
        known = column < units_of(place, columns, step)
    gate = tl.load(of_pair + (column * 2 if INTERLEAVED else column), mask=known, other=0)
    if PARTS == 2:
        up = tl.load(of_pair + (column * 2 + 1 if INTERLEAVED else columns + column), mask=known, other=0)
        h = gated(gate, up, FUNCTION, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
    else:
        h = function(gate, FUNCTION, ALPHA, GATE_CAP)
    tl.store(out + pair.to(tl.int64) * columns + column, h.to(out.dtype.element_ty), mask=known)


@triton.jit
def _row(rows, pair, hidden, part_stride, at, weights, ROW_PARTS: tl.constexpr):
    """Return the row of a choice times its weight, of which there are parts."""
    row = tl.load(rows + pair * hidden + at, mask=at < hidden, other=0)
    for part in tl.static_range(1, ROW_PARTS):
        row += tl.load(rows + part * part_stride + pair * hidden + at, mask=at < hidden, other=0)
    return row * tl.load(weights + pair).to(tl.float32)


@triton.jit
def _sum_of_choices(
    rows, experts, weights, out, hidden, part_stride,
    CHOICES: tl.constexpr, ROW_PARTS: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, at = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0, tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token.to(tl.int64) * CHOICES + choice
        if TABLE:  # noqa: SIM114 - decided as the kernel is compiled
            total += _row(rows, pair, hidden, part_stride, at, weights, ROW_PARTS)
        elif tl.load(experts + pair) != 0:
            total += _row(rows, pair, hidden, part_stride, at, weights, ROW_PARTS)
    tl.store(out + token.to(tl.int64) * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)
