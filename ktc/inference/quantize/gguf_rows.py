"""The bytes of a GGUF file's tensor, a band of rows at a time.

In: a `FileTensor` and a reader of the original's rows. Out: arrays of bytes in the file's type. Q8_0 comes from the
quantiser of the `gguf` package. Q4_0 is written as blocks of the stored INT4 codes: the same weights bit for bit, since
a bf16 scale from 2^-17 to 65,504 is exact in fp16.
Refused: a scale that is not exact in fp16 (Q511), and weights that are not finite in the file's type (Q504).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.quantize.gguf_tensors import Q4_0, FileTensor, Piece
from ktc.model.checkpoint.index import CheckpointIndex
from ktc.model.checkpoint.int4 import unpacked
from ktc.model.checkpoint.quantised import StoredWeight
from ktc.model.checkpoint.reader import RowReader, TensorReader, bands

_FLOATS: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BLOCK: Final = 32


def rows_of(tensor: FileTensor, reader: RowReader) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the bytes of a tensor of any type but Q4_0, in order. Raises InputRefused (Q504)."""
    for piece in tensor.pieces:
        for weights in _weights(piece, reader):
            yield _stored(weights, tensor.type, piece.entry.name)


def codes_of(
    tensor: FileTensor, coded: dict[str, StoredWeight], index: CheckpointIndex, reader: TensorReader
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the blocks of a Q4_0 tensor, in order. Raises InputRefused (Q511)."""
    assert tensor.type == Q4_0, "other types are made of weights"
    for piece in tensor.pieces:
        weight = coded[piece.entry.name]
        assert weight.quantised is not None, "only codes become Q4_0"
        scales = index.tensors[weight.quantised.scale.key]
        per_group = weight.quantised.block[1] // _BLOCK
        rows, columns = weight.quantised.shape
        for run in bands(rows, columns):
            codes = unpacked(reader.read(weight.entry, run), columns)
            blocks = q4_0_blocks(codes, reader.read(scales, run).repeat_interleave(per_group, 1))
            if blocks is None:
                message = f"a scale of `{weight.name}` is not exact in fp16, which Q4_0 has"
                hint = "write its weights as another type: dequantise it with transformers, then convert"
                raise InputRefused(Diagnostic("Q511", message, hint=hint))
            yield _by_pairs(blocks, piece.heads).numpy()


def q4_0_blocks(codes: Tensor, scales: Tensor) -> Tensor | None:
    """Return blocks (rows, bytes), uint8, of int8 codes in [-8, 7] and a scale per 32, or None if one is inexact.

    A block is an fp16 scale, then 16 bytes with the codes j (low) and j + 16, plus 8.
    """
    rows, groups = scales.shape
    halves = scales.to(torch.float16)
    if not torch.equal(halves.to(torch.float32), scales.to(torch.float32)):
        return None
    nibbles = (codes.view(rows, groups, 2, _BLOCK // 2) + 8).view(torch.uint8)
    pairs = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    heads = halves.view(torch.uint8).view(rows, groups, 2)
    return torch.cat((heads, pairs), -1).view(rows, -1)


def _weights(piece: Piece, reader: RowReader) -> Iterator[Tensor]:
    entry = piece.entry
    if not piece.is_plain:
        expert = piece.expert
        matrix = reader.read(entry) if expert is None else reader.read(entry, slice(expert, expert + 1))[0]
        yield _laid_out(matrix, piece)
    elif len(entry.shape) < 2:
        yield reader.read(entry).reshape(1, -1)
    else:
        for run in bands(*entry.shape):
            yield reader.read(entry, run)


def _laid_out(weights: Tensor, piece: Piece) -> Tensor:
    if piece.transposed:
        weights = weights.t()
    if piece.rows is not None:
        first, step, count = piece.rows
        weights = weights[first : first + step * count : step]
    if piece.latent is not None:
        heads, first, count = piece.latent
        of_heads = weights.reshape(heads, -1, weights.shape[1])[:, first : first + count]
        weights = (of_heads.transpose(1, 2) if piece.turned else of_heads).flatten(0, 1)
    return _by_pairs(weights, piece.heads)


def _by_pairs(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of each head's first and second half in turns, as llama.cpp's rotary embedding pairs them."""
    if not heads:
        return rows.contiguous()
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _stored(weights: Tensor, kind: str, name: str) -> np.ndarray[Any, Any]:
    values = weights.to(_FLOATS.get(kind, torch.float32))
    if not bool(torch.isfinite(values).all()):
        message = f"`{name}` has a weight that is not finite as {kind if kind in _FLOATS else 'f32'}"
        raise InputRefused(Diagnostic("Q504", message, hint="find out how it was saved, or write another `--type`"))
    if kind in _FLOATS:
        return values.contiguous().view(torch.uint8).numpy()
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return cast("Any", quantize)(values.contiguous().numpy(), GGMLQuantizationType[kind.upper()])
