"""Few rows times codes of four bits at addresses, by tensor cores: Gluon of Triton, whose layouts are explicit.

In: rows in bf16, the place of each row's expert, and where its matrix is. Out: products with sums in fp32, or what the
activation makes of those of gate and up. Where two programs share the columns, products are in two parts.

A word of 32 bits has the codes of four columns for outputs `lane` and `lane + 16` of a panel (`four_codes` in
`code_kernels.py`). Its codes as four pairs of bf16 are the operand A of `mma.m16n8k16` as they are: a group of four
threads has two outputs, and each of its threads four columns. All columns of B are the row. So no weight moves between
threads, and about two instructions decode one. The scale of a block multiplies its sum in fp32.
Numbers of E2M1 are left as bits that are 2^-126 of them or less; rows are 2^64 of themselves instead. Products of bf16
are exact in fp32, and sums have one order: results are equal to the bit from run to run.
Triton's interpreter has no Gluon: `kept_kernels.py` is the same in plain Triton. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ktc.model.experts.gpu.activation_kernels import constants_of_form, function, gated
from ktc.model.experts.gpu.address_kernels import NO_BIAS, Places, Side, address_of, beginning_of, units_of
from ktc.model.experts.layouts.coded_matrices import CodedMatrices, addressed_codes
from ktc.model.experts.layouts.panel_codes import PanelCodes
from ktc.model.experts.layouts.panels import WIDTH
from ktc.model.kernels.form import ExpertsForm

_UNIT: Final = 16  # bytes that a thread reads at once
NUM_WARPS: Final = 8  # of a program
_SERVED: Final = (("e2m1", "power"), ("signed4", "bf16"), ("signed4", "fp16"))


def serves(rows: Tensor, matrices: CodedMatrices) -> bool:
    """Return whether the kernels multiply these rows with these codes."""
    codes = addressed_codes(matrices.panels)
    if triton.knobs.runtime.interpret or not rows.is_cuda or torch.version.cuda is None or codes is None:
        return False
    known = (codes.numbers, codes.scales) in _SERVED and not codes.least
    return known and matrices.columns % codes.span == 0 and rows.data_ptr() % 8 == 0


def products(
    rows: Tensor, places: Places, matrices: CodedMatrices, *, per_row: int = 1, bias_at: int = NO_BIAS,
    side: Side = "columns",
) -> Tensor:  # fmt: skip
    """See `kept_kernels.products`: `(P / per_row, K), P places -> (parts, P, N)` in fp32."""
    parts = _parts(matrices, len(places.experts), rows.device)
    out = torch.empty(parts, len(places.experts), matrices.shape[1], dtype=torch.float32, device=rows.device)
    of_rows = {"PER_ROW": per_row, "CUT": places.cut(side)}
    _launch(rows, places, matrices, out, bias_at, None, of_rows)
    return out


def activations(
    rows: Tensor, places: Places, matrices: CodedMatrices, form: ExpertsForm, *, per_row: int, bias_at: int
) -> Tensor:
    """See `kept_kernels.activations`: `(P / per_row, H), P places -> (P, I)` in bf16."""
    out = rows.new_empty(1, len(places.experts), matrices.rows)
    of_rows = {"PER_ROW": per_row, "CUT": places.cut("rows")}
    _launch(rows, places, matrices, out, bias_at, form, of_rows)
    return out[0]


def _parts(matrices: CodedMatrices, pairs: int, device: torch.device) -> int:
    """Return how many programs share the columns of two panels: more where they leave processors idle."""
    programs, blocks = triton.cdiv(matrices.num_panels, 2) * pairs, matrices.columns // WIDTH
    return 2 if programs < 2 * _processors(device) and blocks >= 8 * NUM_WARPS else 1


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    rows: Tensor, places: Places, matrices: CodedMatrices, out: Tensor, bias_at: int,
    form: ExpertsForm | None, of_rows: dict[str, Any],
) -> None:  # fmt: skip
    codes = addressed_codes(matrices.panels)
    assert codes is not None and rows.is_contiguous(), "panels that a GPU multiplies, and whole rows"
    of_form = dict.fromkeys(("FUNCTION", "ALPHA", "LIMIT", "UP_OFFSET", "GATE_CAP", "UP_CAP"))
    constants = _constants(codes) | (of_form if form is None else constants_of_form(form))
    with torch.cuda.device_of(rows):  # Triton launches on the current device
        _products[(triton.cdiv(matrices.num_panels, 2), len(places.experts), len(out))](
            rows, *places.given, out, matrices.begin // _UNIT, matrices.panel_bytes // _UNIT, matrices.num_panels,
            matrices.rows, matrices.columns, max(bias_at, 0), places.step, **constants, **of_rows,
            PARTS=matrices.parts, INTERLEAVED=matrices.interleaved, TABLE=places.table is not None,
            BIASED=bias_at != NO_BIAS, ACTIVATED=form is not None, WARPS=NUM_WARPS, num_warps=NUM_WARPS,
        )  # fmt: skip


def _constants(codes: PanelCodes) -> dict[str, Any]:
    return {
        "NUMBERS": codes.numbers, "SCALES": codes.scales, "BLOCKS": codes.span // 32,
        "GROUPS": codes.span // codes.group, "HEAD": codes.head // _UNIT,
    }  # fmt: skip


# Device code ---------------------------------------------------------------------------------------------------------
# Words to operands, and their product: $0 to $3 are the sums, $4 the word, $5 and $6 a row's columns, $7 to $10 sums.
_MMA: Final = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {a0, a1, a2, a3}, {$5, $6}, {$7, $8, $9, $10};"
)


def _e2m1() -> str:
    """Return the code for E2M1: the sign of a number is 12 bits above its code's, the rest 6 bits above.

    Bits of a number are chosen from two shifted words. Of signs every other code's are left in a word, so that those
    of its neighbours come where the other word's bits are taken. Shifts are to the left, which are multiplications.
    """
    lines = [".reg .b32 high, even, odd, n, s, a0, a1, a2, a3;", "shr.u32 high, $4, 8;"]
    lines += ["and.b32 even, $4, 0x08080808;", "and.b32 odd, $4, 0x80808080;"]
    shifts = ("$4", 6, "even", 12), ("$4", 2, "odd", 8), ("high", 6, "even", 4), ("high", 2, "odd", 0)
    for pair, (of, by, signs, sign_by) in enumerate(shifts):
        lines += [f"shl.b32 n, {of}, {by};", f"shl.b32 s, {signs}, {sign_by};"]
        lines += [f"lop3.b32 a{pair}, n, 0x01C001C0, s, 0xE2;"]
    return "\n".join(["{", *lines, _MMA, "}"])


def _signed4() -> str:
    """Return the code for code - 8: the bits of 128 + code, less 136."""
    lines = [".reg .b32 n, one, less, a0, a1, a2, a3;", "mov.b32 one, 0x3F803F80;", "mov.b32 less, 0xC308C308;"]
    for pair in range(4):
        lines += [_shifted("n", -4 * pair), f"lop3.b32 a{pair}, n, 0x000F000F, 0x43004300, 0xEA;"]
        lines += [f"fma.rn.bf16x2 a{pair}, a{pair}, one, less;"]
    return "\n".join(["{", *lines, _MMA, "}"])


def _shifted(to: str, by: int) -> str:
    if by == 0:
        return f"mov.b32 {to}, $4;"
    return f"shl.b32 {to}, $4, {by};" if by > 0 else f"shr.u32 {to}, $4, {-by};"


_E2M1: Final = gl.constexpr(_e2m1())
_SIGNED4: Final = gl.constexpr(_signed4())
_OPERANDS: Final = gl.constexpr("=f,=f,=f,=f,r,r,r,f,f,f,f")
_RAISED: Final = gl.constexpr(
    "{.reg .b32 by, none; mov.b32 by, 0x5F805F80; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, by, none;}"
)


@gluon.jit
def _times(words, x0, x1, sums, NUMBERS: gl.constexpr):
    """Add the products of words' codes with four columns: (threads, 4) each, as `mma` leaves its sums."""
    code: gl.constexpr = _E2M1 if NUMBERS == "e2m1" else _SIGNED4
    kinds: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
    return gl.inline_asm_elementwise(
        code, _OPERANDS, [words, x0, x1, sums[0], sums[1], sums[2], sums[3]], kinds, True, 1
    )


@gluon.jit
def _four_scales(words, four, SCALES: gl.constexpr):
    """Return the scales in words, in fp32: (threads,) -> (threads, 4).

    A byte `e` of `power` is 2^(e - 127) here, since numbers are not doubled; and 0 is 0, in place of 2^-127.
    """
    if SCALES == "power":
        return ((words[:, None] >> (8 * four) & 255) << 23).to(gl.float32, bitcast=True)
    else:
        half = (words[:, None] >> (16 * four)).to(gl.int16)
        return half.to(gl.bfloat16 if SCALES == "bf16" else gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _read(
    words, scales, begin, quad, in_line, four, block, inside,
    SCALES: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr, HEAD: gl.constexpr,
):  # fmt: skip
    """Return the codes of a block of 32 columns, (threads, 4) of each half, and its scales, (threads,) of each half."""
    unit, in_span = begin + block // BLOCKS * (HEAD + BLOCKS * 32), block % BLOCKS
    place = (unit + HEAD + in_span * 32 + in_line * 4 + quad) * 4
    first = gl.load(words + (place[:, None] + four), mask=inside[:, None], other=0)
    second = gl.load(words + ((place + 64)[:, None] + four), mask=inside[:, None], other=0)
    words_of_unit: gl.constexpr = 4 if SCALES == "power" else 2  # each has four scales
    of_group = unit * words_of_unit + in_span // (BLOCKS // GROUPS) * 8 + quad
    lower = gl.load(scales + of_group, mask=inside, other=0)
    upper = gl.load(scales + (of_group + 4), mask=inside, other=0)
    return first, second, lower, upper


@gluon.jit
def _added(row, read, block, there, in_line, four, lower, upper, NUMBERS: gl.constexpr, SCALES: gl.constexpr):
    """Add the products of a block to the sums of outputs 0 to 15, and to those of the others."""
    zero = gl.zeros_like(lower)
    sums = zero, zero, zero, zero
    for half in gl.static_range(2):
        x = gl.load(row + (block * 8 + half * 4 + in_line), mask=there, other=0)
        x0, x1 = x.to(gl.int32), (x >> 32).to(gl.int32)
        if NUMBERS == "e2m1":
            x0 = gl.inline_asm_elementwise(_RAISED, "=r,r", [x0], gl.int32, True, 1)
            x1 = gl.inline_asm_elementwise(_RAISED, "=r,r", [x1], gl.int32, True, 1)
        sums = _times(read[half], x0[:, None], x1[:, None], sums, NUMBERS)
    lower += sums[0] * _four_scales(read[2], four, SCALES)
    upper += sums[2] * _four_scales(read[3], four, SCALES)
    return lower, upper


@gluon.jit
def _two_panels(
    row, words, scales, at, panel_units, there, first_block, blocks,
    NUMBERS: gl.constexpr, SCALES: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr, HEAD: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Return the products of a row with outputs 0 to 15 of two panels, and with the others: (32,) each.

    `at` are the units of 16 bytes before the first panel. A warp has every `WARPS`th block of 32 columns from
    `first_block` on, and reads two of them before it multiplies.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, layout))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    warp, quad, in_line = thread // 32, thread // 4 % 4, thread % 4  # four lanes, and one line of four
    lower = gl.full([32 * WARPS, 4], 0, gl.float32, layout=layout)
    upper = lower
    begin = at + thread // 16 % 2 * panel_units
    for first in range(first_block, blocks, 2 * WARPS):
        block, other = first + warp, first + WARPS + warp
        known, other_known = block < blocks, other < blocks
        of_block = _read(
            words, scales, begin, quad, in_line, four, block, there & known, SCALES, BLOCKS, GROUPS, HEAD
        )  # fmt: skip
        of_other = _read(
            words, scales, begin, quad, in_line, four, other, there & other_known, SCALES, BLOCKS, GROUPS, HEAD
        )  # fmt: skip
        lower, upper = _added(row, of_block, block, known, in_line, four, lower, upper, NUMBERS, SCALES)
        lower, upper = _added(row, of_other, other, other_known, in_line, four, lower, upper, NUMBERS, SCALES)
    if NUMBERS == "e2m1":
        lower, upper = lower * 4611686018427387904.0, upper * 4611686018427387904.0  # 2^62
    is_first = (in_line == 0)[:, None]  # of four threads with the same sums
    return _of_lanes(gl.where(is_first, lower, 0.0), WARPS), _of_lanes(gl.where(is_first, upper, 0.0), WARPS)


@gluon.jit
def _of_lanes(sums, WARPS: gl.constexpr):
    """Return the sums of two panels' 16 lanes: (threads, 4) -> (32,), a thread for each."""
    parts = gl.reshape(sums, [WARPS, 8, 4, 4])  # warp, panel and quad, thread of a line, lane of a quad
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.convert_layout(gl.reshape(gl.sum(gl.sum(parts, 2), 0), [32]), layout)


@gluon.jit
def _stored(out, sums, lane, panel, rows, PARTS: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Store the sums of panels' outputs `lane` in the order of the decoded matrix (`row_of` in `coded_kernels.py`)."""
    width: gl.constexpr = 32 // PARTS
    part, inner = lane // width, panel * width + lane % width
    place = inner * PARTS + part if INTERLEAVED else part * rows + inner
    gl.store(out + place, sums, mask=inner < rows)


@gluon.jit(do_not_specialize=["bias_at", "experts"])
def _products(
    x, addresses, table, experts, out, first, panel_units, panels, rows, columns, bias_at, step,
    NUMBERS: gl.constexpr, SCALES: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr, HEAD: gl.constexpr,
    PARTS: gl.constexpr, INTERLEAVED: gl.constexpr, PER_ROW: gl.constexpr, TABLE: gl.constexpr, BIASED: gl.constexpr,
    ACTIVATED: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr, GATE_CAP: gl.constexpr, UP_CAP: gl.constexpr, CUT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    panel, pair = gl.program_id(0) * 2, gl.program_id(1)
    place = address_of(addresses, table, pair, experts, TABLE)
    is_left = place == 0
    if CUT == "rows":
        is_left |= panel * (32 // PARTS) >= units_of(place, rows, step)
    if is_left:
        return
    base = place if CUT is None else beginning_of(place)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    there = panel + gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, layout)) // 16 % 2 < panels
    kind: gl.constexpr = gl.int32 if SCALES == "power" else gl.int64  # of four scales
    words = gl.multiple_of(base.to(gl.pointer_type(gl.int32)), 16)
    scales = gl.multiple_of(base.to(gl.pointer_type(kind)), 16)
    row = (x + (pair // PER_ROW).to(gl.int64) * columns).to(gl.pointer_type(gl.int64), bitcast=True)
    part, blocks = gl.program_id(2), (units_of(place, columns, step) if CUT == "columns" else columns) // 32
    share = gl.cdiv(blocks, gl.num_programs(2))
    lower, upper = _two_panels(
        row, words, scales, first + panel * panel_units, panel_units, there,
        part * share, gl.minimum((part + 1) * share, blocks),
        NUMBERS, SCALES, BLOCKS, GROUPS, HEAD, WARPS,
    )  # fmt: skip
    at = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    of_panel, lane = panel + at // 16, at % 16
    if BIASED:
        bias = (base + bias_at).to(gl.pointer_type(gl.float32)) + (of_panel * 32 + lane)
        biased = (of_panel < panels) & (part == 0)
        lower += gl.load(bias, mask=biased, other=0)
        upper += gl.load(bias + 16, mask=biased, other=0)
    if not ACTIVATED:
        result = out + (part * gl.num_programs(1) + pair).to(gl.int64) * PARTS * rows
        _stored(result, lower, lane, of_panel, rows, PARTS, INTERLEAVED)
        _stored(result, upper, lane + 16, of_panel, rows, PARTS, INTERLEAVED)
    elif PARTS == 2:
        h = gated(lower, upper, FUNCTION, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
        inner = of_panel * 16 + lane
        gl.store(out + pair.to(gl.int64) * rows + inner, h.to(gl.bfloat16), mask=inner < rows)
    else:
        result = out + pair.to(gl.int64) * rows
        h, further = function(lower, FUNCTION, ALPHA, GATE_CAP), function(upper, FUNCTION, ALPHA, GATE_CAP)
        _stored(result, h.to(gl.bfloat16), lane, of_panel, rows, 1, False)
        _stored(result, further.to(gl.bfloat16), lane + 16, of_panel, rows, 1, False)
