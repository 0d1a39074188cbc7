"""Load the values of a row of `weights.json`: read, dequantise, and convert to the stock model's layout.

Codes are dequantised in bands of rows, so that only a few megabytes are held in addition to the result. Input: a
reader, the index and a row. Output: the weight, or the slice of one expert. Rows have been checked before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ktc.foundation.anonymous_memory import take_huge_pages
from ktc.model.checkpoint import gguf_values, nvfp4
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.index import CheckpointIndex
from ktc.model.checkpoint.int4 import nibbles
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.checkpoint.source import COUNTED, Method, Operation, Quantised, Step, WeightSource
from ktc.model.checkpoint.uint4 import blocks_of

_BAND = 1 << 22  # weights dequantised per step: 16 MB as fp32
Binary = Callable[[Tensor, Tensor], Tensor]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_weight(
    reader: TensorReader, index: CheckpointIndex, source: WeightSource, expert: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the tensor of `source`, or the slice of `expert` of a stacked one, with its steps applied, on the CPU.

    A plain tensor keeps its stored dtype; dequantised values are rounded to `dtype`, once.
    """
    stacked = source.transform == "per_expert" and expert is not None
    if source.block is not None:
        entry = index.tensors[source.source_key]
        tensor = gguf_values.read_dequantised(reader, entry, expert if stacked else None, dtype)
    elif source.quantised is None:
        entry = index.tensors[source.source_key]
        tensor = _read_expert(reader, entry, source, expert) if stacked and expert is not None else reader.read(entry)
    else:
        *stack, rows, _ = source.quantised.shape
        run = slice(expert * rows, (expert + 1) * rows) if stacked and expert is not None else None
        whole = slice(0, math.prod(stack) * rows)
        codes = index.tensors[source.source_key]
        tensor = read_rows(reader, index, codes, source.quantised, run or whole, dtype)
        tensor = tensor if run else tensor.view(source.quantised.shape)
    steps = source.steps[1:] if stacked and source.is_flat else source.steps
    return laid_out(tensor, steps, 1 if stacked else 0)


def _read_expert(reader: TensorReader, entry: TensorEntry, source: WeightSource, expert: int) -> Tensor:
    if not source.is_flat:
        return reader.read(entry, slice(expert, expert + 1))[0]
    rows = entry.shape[0] // source.num_stacked
    return reader.read(entry, slice(expert * rows, (expert + 1) * rows))


def read_codes(
    reader: TensorReader, index: CheckpointIndex, source: WeightSource, expert: int | None
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Read a source that has `plain_codes`; return a function for any thread, which does the work that follows.

    It returns codes (rows, columns) and scales (rows, groups), fp32. Codes of int4 are int8; of fp8 they are bytes.
    """
    assert source.quantised is not None, "only quantised weights have codes"
    *stack, rows, _ = source.quantised.shape
    matrix = expert if source.transform == "per_expert" and expert is not None else 0
    run = _shifted(slice(0, rows), matrix * rows)
    codes = reader.read(_as_rows(index.tensors[source.source_key], math.prod(stack) * rows), run)
    per_matrix = -(-rows // source.quantised.block[0])
    entry = _as_rows(index.tensors[source.quantised.scale.key], math.prod(stack) * per_matrix)
    scales = reader.read(entry, _shifted(slice(0, per_matrix), matrix * per_matrix))
    return partial(_codes_and_scales, source, source.quantised, codes, scales)


def _codes_and_scales(
    source: WeightSource, quantised: Quantised, codes: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    *_, rows, columns = quantised.shape
    of_row = _scale_values(scales).repeat_interleave(quantised.block[0], 0)[:rows]
    assert source.plain_codes is not None, "other codes are dequantised"
    of_row = of_row.repeat_interleave(-(-quantised.block[1] // source.plain_codes[1]), 1)
    return codes.view(torch.uint8) if quantised.method == "fp8" else nibbles(codes)[:, :columns] - 8, of_row


def read_blocks(
    reader: TensorReader, index: CheckpointIndex, source: WeightSource, expert: int | None
) -> Callable[[], Tensor]:
    """Read a source with `plain_blocks` or `plain_rows`, one expert or all; return a function for any thread.

    It returns blocks (rows, bytes of a row), laid out as GGUF files have them, INT4 as `ktc.model.checkpoint.uint4`
    does. Rows are outputs for any steps.
    """
    entry = index.tensors[source.source_key]
    if source.quantised is None:
        blocks = gguf_values.read_blocks(reader, entry, expert)
        return lambda: blocks
    if source.quantised.method == "int4":
        return _int4_blocks(reader, index, source, source.quantised)
    if source.quantised.method == "nvfp4":
        return _nvfp4_blocks(reader, index, source, source.quantised)
    *stack, rows, _ = source.quantised.shape
    of_expert = slice(0, math.prod(stack) * rows) if expert is None else slice(expert * rows, (expert + 1) * rows)
    codes, scales = (
        reader.read(_as_rows(index.tensors[key], math.prod(stack) * rows), of_expert)
        for key in (entry.name, source.quantised.scale.key)
    )
    return partial(gguf_values.mxfp4_blocks, codes, scales.view(torch.uint8))


def _nvfp4_blocks(
    reader: TensorReader, index: CheckpointIndex, source: WeightSource, quantised: Quantised
) -> Callable[[], Tensor]:
    codes, scales = (reader.read(index.tensors[key]) for key in (source.source_key, quantised.scale.key))
    matrix_scale = _matrix_scale(reader, index, quantised)
    assert matrix_scale is not None, "the row was checked"
    return partial(nvfp4.blocks_of, codes, scales, matrix_scale)


def _int4_blocks(
    reader: TensorReader, index: CheckpointIndex, source: WeightSource, quantised: Quantised
) -> Callable[[], Tensor]:  # fmt: skip
    words, scales = (reader.read(index.tensors[key]) for key in (source.source_key, quantised.scale.key))
    return partial(_int4_of, source.int4_group, quantised, words, scales, _zero_points(reader, index, quantised))


def _int4_of(group: int, quantised: Quantised, words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return blocks of a scale, a zero point and codes. Codes without zero points are offset by 8."""
    codes, scales = nibbles(words)[:, : quantised.shape[-1]], scales.float()
    of_groups = torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros.int()
    repeats = quantised.block[1] // group
    of_groups, scales = (t.repeat_interleave(repeats, 1) for t in (of_groups + 8, scales))
    return blocks_of(codes.view(torch.uint8), scales, of_groups, group)


def read_rows(
    reader: TensorReader, index: CheckpointIndex, codes: TensorEntry, quantised: Quantised, run: slice,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the weights (rows of `run`, columns), rounded to `dtype` once; stacked matrices are one after the other.

    `codes` is the tensor that `quantised` describes.
    """
    *stack, rows, columns = quantised.shape
    matrices, per_scale = math.prod(stack), quantised.block[0]
    per_matrix = -(-rows // per_scale)
    all_codes = _as_rows(codes, matrices * rows)
    all_scales = _as_rows(index.tensors[quantised.scale.key], matrices * per_matrix)
    zeros, matrix_scale = _zero_points(reader, index, quantised), _matrix_scale(reader, index, quantised)
    out = torch.empty((run.stop - run.start, columns), dtype=dtype)
    take_huge_pages(out.data_ptr(), out.nbytes)
    band = max(1, _BAND // (columns * per_scale)) * per_scale
    done = 0
    while done < len(out):  # up to the end of a matrix or a band, from the beginning of a row of scales
        matrix, row = divmod(run.start + done, rows)
        first = row // per_scale * per_scale
        stop = min(rows, row + len(out) - done, first + band)
        of_scales = slice(first // per_scale, -(-stop // per_scale))
        scales = reader.read(all_scales, _shifted(of_scales, matrix * per_matrix))
        weights = _METHODS[quantised.method](
            reader.read(all_codes, _shifted(slice(first, stop), matrix * rows)),
            scales if matrix_scale is None else scales.float() * matrix_scale,
            None if zeros is None else zeros[of_scales],
            quantised.block,
            columns,
        )[row - first :]
        out[done : done + len(weights)] = weights
        done += len(weights)
    return out


def _as_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """Return the same bytes as a matrix: stacked matrices concatenated by rows, the blocks of a row concatenated."""
    return replace(entry, shape=(rows, math.prod(entry.shape) // rows))


def _shifted(run: slice, by: int) -> slice:
    return slice(run.start + by, run.stop + by)


def _zero_points(reader: TensorReader, index: CheckpointIndex, quantised: Quantised) -> Tensor | None:
    """Return zero points (rows, groups) as int8; eight rows share a word."""
    if quantised.zero_point is None:
        return None
    words = reader.read(index.tensors[quantised.zero_point.key])
    return nibbles(words.t().contiguous())[:, : quantised.shape[-2]].t() - 8


def _matrix_scale(reader: TensorReader, index: CheckpointIndex, quantised: Quantised) -> Tensor | None:
    if quantised.matrix_scale is None:
        return None
    return nvfp4.matrix_scale(reader.read(index.tensors[quantised.matrix_scale.key]), divides=quantised.divides)


def _fp8(codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int], columns: int) -> Tensor:
    return _scaled(_fp8_values(codes), _scale_values(scales), block)


def _fp8_values(codes: Tensor) -> Tensor:
    """Return fp32 values of E4M3 codes: their bits, shifted to bf16's positions, are the value times 2^-120.

    PyTorch's own cast runs at 0.25 billion values per second and core, this at 1.2.
    """
    if codes.dtype != torch.float8_e4m3fn:
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    magnitude = bits & 0x7F
    if magnitude.numel() and int(magnitude.max()) == 0x7F:  # NaN, which this shift does not convert to bf16
        return codes.float()
    return magnitude.bitwise_left_shift_(4).bitwise_or_(bits & -0x8000).view(torch.bfloat16).float().mul_(2.0**120)


def _scale_values(scales: Tensor) -> Tensor:
    """Return scales as fp32; bytes are exponents of two."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)


def _int4(codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int], columns: int) -> Tensor:
    values = (nibbles(codes)[:, :columns] - 8).to(scales.dtype)
    if zeros is not None:
        values = _by_group(torch.sub, values, zeros.to(scales.dtype), block[1])
    return _scaled(values, scales, block)


def _fp4(codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int], columns: int) -> Tensor:
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
    return _scaled(table[nibbles(codes)[:, :columns].int()], _scale_values(scales), block)


def _scaled(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return each block of `values` times its scale, in their dtype; the last rows and columns may be incomplete."""
    of_row = scales.repeat_interleave(block[0], 0)[: len(values)] if block[0] > 1 else scales
    return _by_group(torch.mul, values, of_row, block[1])


def _by_group(operation: Binary, values: Tensor, of_group: Tensor, size: int) -> Tensor:
    """Apply `operation` to each range of `size` columns of `values` and the corresponding column of `of_group`."""
    whole = values.shape[1] // size
    parts: list[Tensor] = []
    if whole:
        grouped = values[:, : whole * size].reshape(-1, whole, size)
        parts.append(operation(grouped, of_group[:, :whole, None]).flatten(1))
    if whole * size < values.shape[1]:
        parts.append(operation(values[:, whole * size :], of_group[:, whole:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


_METHODS: dict[Method, Callable[..., Tensor]] = {"fp8": _fp8, "int4": _int4, "mxfp4": _fp4, "nvfp4": _fp4}


def laid_out(tensor: Tensor, steps: Sequence[Step], taken: int) -> Tensor:
    """Apply `steps` to a tensor from which `taken` leading dimensions were removed."""
    for step in steps:
        runs = step.dims[1:] if step.operation in COUNTED else ()
        dims = step.dims[: len(step.dims) - len(runs)]
        tensor = _STEPS[step.operation](tensor, *(dim - taken for dim in dims), *runs)
    return tensor


def _deinterleave(tensor: Tensor, dim: int, runs: int = 1) -> Tensor:
    in_run = torch.arange(tensor.shape[dim]).reshape(runs, -1, 2)
    return tensor.index_select(dim, in_run.transpose(1, 2).reshape(-1))


def _unflatten(tensor: Tensor, dim: int, count: int) -> Tensor:
    return cast("Tensor", tensor.unflatten(dim, (count, -1)))


def _chunk(tensor: Tensor, dim: int, number: int, count: int) -> Tensor:
    return tensor.chunk(count, dim)[number]


_STEPS: dict[Operation, Callable[..., Tensor]] = {
    "transpose": torch.transpose,
    "deinterleave": _deinterleave,
    "deinterleave_runs": _deinterleave,
    "unsqueeze": torch.unsqueeze,
    "unflatten": _unflatten,
    "chunk": _chunk,
}
