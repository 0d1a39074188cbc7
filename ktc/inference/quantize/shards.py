"""One file of a quantised checkpoint, written tensor by tensor.

In: a file of the original, by its headers, and what is quantised in it. Out: a safetensors file with the other tensors
as they are, and `weight_packed`, `weight_scale` and `weight_shape` for each that is quantised. Memory holds a band of
rows, and the scales of one tensor.
Refused (Q504): weights that are not finite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.quantize.scheme import Scheme
from ktc.model.checkpoint.header import STORED_DTYPES, TensorEntry
from ktc.model.checkpoint.int4 import packed, quantised
from ktc.model.checkpoint.reader import RowReader, bands


@dataclass(slots=True)
class Rounding:
    """Sums of squares over quantised weights: of the weights, of their change, and of what an adapter added to them."""

    weights: float = 0.0
    change: float = 0.0
    added: float = 0.0


Parts = tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype as stored, shape, bytes


def stored_parts(entry: TensorEntry, scheme: Scheme | None) -> Parts:
    """Return the tensors that are written for one of the original, which is quantised where there is a scheme."""
    if scheme is None:
        return ((entry.name, STORED_DTYPES[entry.dtype], entry.shape, entry.end - entry.begin),)
    rows, columns = entry.shape
    words, groups = -(-columns // 8), columns // (columns if scheme.group == -1 else scheme.group)
    scale = "F16" if entry.dtype == "f16" else "BF16"
    return (
        (f"{entry.name}_packed", "I32", (rows, words), 4 * rows * words),
        (f"{entry.name}_scale", scale, (rows, groups), 2 * rows * groups),
        (f"{entry.name}_shape", "I64", (2,), 16),
    )


def write_shard(
    entries: Sequence[TensorEntry], chosen: Mapping[str, TensorEntry], scheme: Scheme, reader: RowReader, path: Path,
    done: Callable[[int], None], added: Callable[[], float],
) -> Rounding:  # fmt: skip
    """Write the tensors of one file to `path`, and return what rounding did to those that are quantised.

    `done` receives the bytes of the original that were read. `added` returns the sum of squares that an adapter has
    added to what was read so far.
    """
    rounding = Rounding()
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        for name, dtype, shape, size in stored_parts(entry, scheme if entry.name in chosen else None):
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            if entry.name in chosen:
                before = added()
                _quantise(entry, scheme, reader, out, rounding)
                rounding.added += added() - before
            else:
                _copy(entry, reader, out)
            done(entry.end - entry.begin)
    return rounding


def _quantise(entry: TensorEntry, scheme: Scheme, reader: RowReader, out: IO[bytes], rounding: Rounding) -> None:
    rows, columns = entry.shape
    scales: list[Tensor] = []
    for run in bands(rows, columns):
        weight = reader.read(entry, run)
        try:
            rounded = quantised(weight, scheme.group)
        except ValueError as error:
            hint = "find out how it was trained or saved; INT4 has no code for such a value"
            raise InputRefused(Diagnostic("Q504", f"`{entry.name}`: {error}", hint=hint)) from error
        _put(packed(rounded.codes), out)
        scales.append(rounded.scales)
        exact = weight.to(torch.float32, copy=True)
        rounding.weights += float(exact.square().sum())
        rounding.change += float(exact.sub_(rounded.weight(torch.float32)).square().sum())
    _put(torch.cat(scales), out)
    _put(torch.tensor([rows, columns], dtype=torch.int64), out)


def _copy(entry: TensorEntry, reader: RowReader, out: IO[bytes]) -> None:
    if not entry.shape:
        _put(reader.read(entry), out)
        return
    of_row = max(1, (entry.end - entry.begin) // max(1, entry.shape[0]))
    for run in bands(entry.shape[0], of_row):
        _put(reader.read(entry, run), out)


def _put(tensor: Tensor, out: IO[bytes]) -> None:
    out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
