"""The memory of one layer's routed experts beside their packed weights, and of a linear layer's product, in bytes.

In: a kernel's spec. Out: the exact bytes that forward saves for backward, and an upper bound of the workspace of a
call. Only `runtime/include/ktc` declares the layout of that workspace. Tests compare the bound with an engine's
reservation: it is never less, and at most a quarter more in a layer of ordinary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ktc.foundation.formats import BLOCKS, FORMATS, Dense, WeightFormat
from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.packed_size import PANEL, padded

_RANK_UNIT: Final = 8  # saved low-rank rows are padded to it
_DROPPED: Final = 128  # columns whose bits are drawn together: `lora_dropout.hpp`
_ITEM: Final = {"bf16": 2, "fp32": 4, "fp64": 8}
_INDEX: Final = 8
# What one thread's sums take at most, with tiles and without; `sums_at_hand` of moe_sweep.hpp asserts it.
_TILED_SUMS: Final = 3 << 18
_SUMS: Final = 1 << 14
# Of fixed_point_rows.hpp, bytes beside the words of 32 values; of multiply_word_panel.hpp, scales and minima beside
# them, at most.
_WORD_BLOCK, _WORD_SCALES = 16, 1 / 8
# Of code_products.hpp: the most rows of an expert whose codes are multiplied as they are stored, and the bytes of a
# value of these rows at most: a word with what is beside it, or fp32.
_FEW_ROWS, _FEW_ROWS_BF16 = 16, 6
_FLOAT = 4
# Of linear_panels.hpp: 16 and 128 groups of at most 12 rows, the bytes of rows between them, a stretch of a panel.
_FEWEST_ROWS, _MOST_ROWS, _ROW_BYTES, _STRETCH = 16 * 12, 128 * 12, 16 << 20, 256


@dataclass(frozen=True, slots=True)
class Slots:
    """Bytes beside the weights. `saved` is per token, for backward; the workspace is one for all layers.

    `_around` are copies of hidden states on the host, `_gradients` the rows of which backward makes the gradients of
    weights. The pairs are bounds for forward and for backward: per token, and for all threads together. `_few` is the
    most slots of experts with few rows, and the bytes of one; a token has `_top_k` slots.
    """

    saved: int
    _around: int
    _gradients: int
    _per_token: tuple[int, int]
    _scratch: tuple[int, int]
    _few: tuple[int, int]
    _top_k: int

    def forward(self, tokens: int) -> int:
        """Workspace and copies of the hidden states on the host, of a forward without gradients."""
        return tokens * self._around + self.workspace(tokens, backward=False)

    def backward(self, tokens: int) -> int:
        """Return the same for backward, with the rows of gradients (`SlotRows`)."""
        return tokens * (2 * self._around + self._gradients) + self.workspace(tokens, backward=True)

    def workspace(self, tokens: int, *, backward: bool) -> int:
        """Return an upper bound of the kernel's reservation for a call."""
        most, few_bytes = self._few
        few = min(tokens * self._top_k, most) * few_bytes
        return tokens * self._per_token[backward] + self._scratch[backward] + few


def slots_of(
    spec: FusedMoeSpec, *, keep: bool, ranks: tuple[int, int] = (0, 0), threads: int = 1, weights_train: bool = False,
    dropout: bool = False,
) -> Slots:  # fmt: skip
    """Return the bytes of a layer that keeps gate and up for backward, or its input to recompute them.

    `ranks` are those of LoRA on the first product and on down (0: none). Its gradients read the input too, and the
    low-rank values of each slot. `weights_train`: backward makes gradients of weights, or of factors merged into them.
    With `dropout` each pass has a bit for each input of LoRA, and rows without what is dropped. The bound of forward
    holds in evaluation too, where nothing is dropped.
    """
    sizes = _Sizes.of(spec)
    bits, rows = _dropped(sizes, ranks) if dropout else (0, 0)
    drops = _forward(spec, sizes, ranks, drops=True) + bits + rows if dropout else 0
    again = 0 if keep or not ranks[0] else sizes.top_k * sizes.hidden * sizes.item
    factors = _factors(spec, ranks)
    return Slots(
        saved=_saved(spec, sizes, ranks, keep=keep),
        _around=2 * sizes.hidden * sizes.item,  # input and output
        _gradients=weights_train * sizes.top_k * (sizes.outputs + sizes.inter) * sizes.item,
        _per_token=(
            max(_forward(spec, sizes, ranks, drops=False), drops),
            _backward(spec, sizes, ranks, keep=keep) + bits + again * dropout,
        ),
        _scratch=(
            threads * _thread(spec, sizes, ranks, panels=_decoded_panels(spec), quantises=True) + factors,
            threads * _thread(spec, sizes, ranks, panels=2, quantises=not keep) + 2 * factors,
        ),
        _few=_few(spec, sizes),
        _top_k=sizes.top_k,
    )


@dataclass(frozen=True, slots=True)
class ProductRows:
    """The workspace of a linear layer's product with many rows, as `linear_panels.hpp` cuts them, in fp32.

    `width` is the larger of inputs and outputs: the contraction of one direction.
    """

    width: int
    threads: int

    def workspace(self, tokens: int) -> int:
        """Return an upper bound of the kernel's reservation for a call."""
        row = 4 * self.width
        at_a_time = min(max(_ROW_BYTES, _FEWEST_ROWS * row), _MOST_ROWS * row)
        scratch = 4 * PANEL * (_STRETCH + _MOST_ROWS)
        return min(tokens * row, at_a_time) + self.threads * scratch


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Widths, padded, and bytes of an element and of a sum. `outputs` are those of the first product."""

    top_k: int
    hidden: int
    inter: int
    outputs: int
    item: int
    total: int

    @classmethod
    def of(cls, spec: FusedMoeSpec) -> _Sizes:
        inter = padded(spec.intermediate or 0)
        total = 8 if spec.dtype == "fp64" else 4  # never less than fp32
        outputs = (1 + spec.gated) * inter
        return cls(spec.top_k or 0, padded(spec.hidden or 0), inter, outputs, _ITEM[spec.dtype], total)


def _saved(spec: FusedMoeSpec, sizes: _Sizes, ranks: tuple[int, int], *, keep: bool) -> int:
    """Bytes per token: gate, up and low-rank rows of each slot, or the input; and the routing."""
    rows = sum(-(-rank // _RANK_UNIT) * _RANK_UNIT for rank in ranks)
    kept = sizes.top_k * (sizes.outputs * sizes.item + rows * sizes.total) if keep else 0
    needs_input = not keep or any(ranks)
    return kept + needs_input * (spec.hidden or 0) * sizes.item + sizes.top_k * (_INDEX + sizes.total)


def _forward(spec: FusedMoeSpec, sizes: _Sizes, ranks: tuple[int, int], *, drops: bool) -> int:
    """Workspace per token: rows that each product reads, and the sums over experts.

    Beside integers LoRA reads elements, but in a call that drops inputs it has rows of its own (`_dropped`).
    """
    beside = tuple(spec.integer_products and rank > 0 and not drops for rank in ranks)
    hidden = (not spec.integer_products or beside[0]) * sizes.hidden * sizes.item
    inter = (1 + beside[1]) * sizes.inter * sizes.item
    integers = _quantised(spec, sizes) + _words(spec, sizes)
    return _token(spec, sizes) + sizes.top_k * (hidden + inter + sizes.total + _low_rank(sizes, ranks) + integers)


def _backward(spec: FusedMoeSpec, sizes: _Sizes, ranks: tuple[int, int], *, keep: bool) -> int:
    """Return the same for backward: gradients of the output, of gate and up, and of the routing weight, in parts."""
    gate_up = sizes.outputs * sizes.item * (1 if keep else 2)
    weight_parts = (sizes.inter // PANEL + 2) * sizes.total
    slot = sizes.hidden * sizes.item + gate_up + weight_parts + 2 * _low_rank(sizes, ranks)
    again = 0 if keep else _quantised(spec, sizes) + _words(spec, sizes)
    return _token(spec, sizes) + sizes.top_k * (slot + again)


def _token(spec: FusedMoeSpec, sizes: _Sizes) -> int:
    """Return the bytes of a token's sums, and of its hidden state in integers."""
    return (sizes.hidden + PANEL) * sizes.total + spec.integer_products * (sizes.hidden + 2 * PANEL)


def _low_rank(sizes: _Sizes, ranks: tuple[int, int]) -> int:
    """Return the bytes of a slot's low-rank values, as elements and as sums."""
    return sum(padded(rank) for rank in ranks) * (sizes.item + sizes.total)


def _dropped(sizes: _Sizes, ranks: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes per token of dropout in forward: bits, and rows that one product reads, then the other."""
    widths = [width for width, rank in zip((sizes.hidden, sizes.inter), ranks, strict=True) if rank]
    bits = sum(-(-width // _DROPPED) * _DROPPED // 8 for width in widths)
    return sizes.top_k * bits, sizes.top_k * max(widths, default=0) * sizes.item


def _quantised(spec: FusedMoeSpec, sizes: _Sizes) -> int:
    """Return the bytes of a slot's rows in integers."""
    return max(sizes.hidden, sizes.inter) + 2 * PANEL if spec.integer_products else 0


def _words(spec: FusedMoeSpec, sizes: _Sizes) -> int:
    """Return the bytes of a slot's rows in 16-bit fixed point: of one product, then of the other."""
    widths = (sizes.hidden, spec.format_gate_up), (sizes.inter, spec.format_down)
    of_block = PANEL * 2 + _WORD_BLOCK
    return max(width // PANEL * of_block * _reads_words(spec, weight_format) for width, weight_format in widths)


def _few(spec: FusedMoeSpec, sizes: _Sizes) -> tuple[int, int]:
    """Return the most slots of experts with few rows, and the bytes of a slot in the form that codes are read with."""
    isa = INSTRUCTION_SETS[spec.isa]
    coded = any(not isinstance(FORMATS[name], Dense) and not _reads_words(spec, name) for name in spec.formats)
    if not coded or spec.integer_products or spec.isa == "scalar":
        return 0, 0
    rows = _FEW_ROWS_BF16 if isa.bf16_products else _FEW_ROWS
    of_value = 2 + _WORD_BLOCK / PANEL if isa.bf16_products else _FLOAT
    return (spec.num_experts or 0) * rows, int(max(sizes.hidden, sizes.inter) * of_value)


def _reads_words(spec: FusedMoeSpec, weight_format: WeightFormat) -> bool:
    return INSTRUCTION_SETS[spec.isa].words and weight_format in BLOCKS and BLOCKS[weight_format].coded


def _factors(spec: FusedMoeSpec, ranks: tuple[int, int]) -> int:
    """B of both products expert after expert, which PEFT stores otherwise; backward has gradients of the same size."""
    hidden, inter = spec.hidden or 0, spec.intermediate or 0
    values = ranks[0] * (1 + spec.gated) * inter + ranks[1] * hidden
    return (spec.num_experts or 0) * values * _Sizes.of(spec).total


def _thread(spec: FusedMoeSpec, sizes: _Sizes, ranks: tuple[int, int], *, panels: float, quantises: bool) -> int:
    """Return the bytes of one thread.

    They hold sums, panels of weights decoded or transposed, a panel of LoRA's factors with three of their gradients
    (A, and B of gate and of up), and a group's rows before they become integers."""
    width = max(sizes.hidden, sizes.outputs) * PANEL * sizes.item
    rank = padded(max(ranks))
    low_rank = width + rank * PANEL * (sizes.item + 3 * sizes.total) if rank else 0
    rows = PANEL * (sizes.inter + 2 * PANEL) if quantises and spec.integer_products else 0
    sums = _TILED_SUMS if INSTRUCTION_SETS[spec.isa].tiles else _SUMS
    return sums + int(panels * width) + low_rank + rows


def _decoded_panels(spec: FusedMoeSpec) -> float:
    """Return the panels of weights that a thread decodes in forward. Words have their scales and minima beside them."""
    if any(_reads_words(spec, name) for name in spec.formats):
        return 1 + _WORD_SCALES
    return 0 if all(isinstance(FORMATS[name], Dense) for name in spec.formats) else 1
