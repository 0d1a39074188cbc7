"""`StepIndex`: codes of keys at fixed addresses, by column, for steps that are captured once and replayed on a GPU.

In: keys of a memory whose rows change between steps. Out: codes of the columns that a row has; a step adds those of its
new key (`sparse_kernels.py`). A key's numbers `j`, `j + n`, ... are in byte `j` of `n`, for each of the powers of two
that its width is the sum of. The codes are those of `key_codes.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.key_codes import encode, mean_of, parts, signs, unpacked
from ktc.model.attention.sparsity import IndexFormat

_BITS: Final = {"int4": 4, "sign": 1}
_LEAST: Final = 32  # numbers of a part, which products of int8 take
_CHUNK: Final = 8192  # columns that are encoded at once


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Codes (B, K, L, bytes) uint8 and `scales` (B, K, L) fp16 of keys around `mean` (B, K, k), at fixed addresses.

    The `signs` (k,) of the rotation are on the same device.
    """

    codes: Tensor
    scales: Tensor
    mean: Tensor
    signs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that belong to the rows."""
        return self.codes, self.scales, self.mean

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes + self.mean.nbytes

    def first(self, rows: int) -> StepIndex:
        """Return the index of the first rows: views."""
        return StepIndex(self.codes[:rows], self.scales[:rows], self.mean[:rows], self.signs)


def signs_on(mean: Tensor) -> Tensor:
    """Return the signs of the rotation for keys like those of a mean, on its device."""
    return _signs_on(mean.shape[-1], mean.device)


@functools.cache
def _signs_on(width: int, device: torch.device) -> Tensor:
    return signs(width).to(device)  # once: a graph keeps its address


def unfit_width(width: int, rope: int = 0) -> str:
    """Return why keys of `width` numbers, and of `rope` rotary ones beside them, have no such index; "" if they can."""
    halves = parts(width + rope)
    alone = parts(width)
    is_split = (not rope and len(halves) <= 2) or (rope and halves == (*alone, rope) and len(alone) == 1)
    if is_split and min(halves) >= _LEAST:
        return ""
    rotary = f" and {rope} rotary ones" if rope else ""
    return f"keys of {width} numbers{rotary} do not split into one or two powers of two from {_LEAST} on"


@dataclass(frozen=True, slots=True)
class IndexedLayer:
    """How a layer of a memory is indexed: the `format` of codes, and whether keys are latents, with rotary `values`.

    Memories of up to `budget` positions have no codes: attention reads all.
    """

    format: IndexFormat
    is_latent: bool
    budget: int

    def view(self, keys: Tensor, values: Tensor) -> KVCacheView:
        """Return what a layer of a cache holds."""
        return KVCacheView(keys, keys, values) if self.is_latent else KVCacheView(keys, values)

    def index(self, keys: Tensor, values: Tensor) -> StepIndex:
        """Return an empty index for keys (B, K, L, k) of a memory."""
        B, K, L, width = keys.shape
        width += values.shape[-1] if self.is_latent else 0
        made = keys.new_zeros
        return StepIndex(
            made((B, K, L, width * _BITS[self.format] // 8), dtype=torch.uint8),
            made((B, K, L), dtype=torch.float16), made((B, K, width), dtype=torch.float32),
            _signs_on(width, keys.device),
        )  # fmt: skip

    def position_bytes(self, keys: Tensor, values: Tensor) -> int:
        """Return the bytes of codes and scales for one position of keys and values (K, L, k)."""
        index = self.index(keys[None, :, :1], values[None, :, :1])
        return index.codes.nbytes + index.scales.nbytes

    def encode(self, index: StepIndex, keys: Tensor, values: Tensor, row: int, columns: slice) -> None:
        """Write the codes of some columns of a row, around the mean of their keys."""
        kept = self.view(keys[row : row + 1, :, columns], values[row : row + 1, :, columns])
        parts_of_key = [kept.keys] if kept.rope_keys is None else [kept.keys, kept.rope_keys]
        index.mean[row] = torch.cat([mean_of(tensor) for tensor in parts_of_key], -1)[0]
        count = kept.keys.shape[2]
        for at in range(0, count, _CHUNK):
            part = torch.cat([tensor[:, :, at : at + _CHUNK] for tensor in parts_of_key], -1)
            codes = encode(part, index.mean[row : row + 1], self.format)
            numbers = unpacked(codes, self.format, part.shape[-1])[0, :, : part.shape[2]]
            into = slice(columns.start + at, columns.start + at + part.shape[2])
            index.codes[row, :, into] = _packed(numbers, self.format)
            index.scales[row, :, into] = codes.scales[0, :, : part.shape[2]]


def _packed(numbers: Tensor, format: IndexFormat) -> Tensor:
    """Codes (..., k) -> bytes (..., k * bits / 8)."""
    bits = _BITS[format]
    fields = (numbers + 8 if bits == 4 else numbers > 0).to(torch.uint8)
    shifts = torch.arange(8 // bits, dtype=torch.uint8, device=fields.device)[:, None] * bits
    packed = [
        (part.view(*part.shape[:-1], 8 // bits, -1) << shifts).sum(-2, dtype=torch.uint8)
        for part in torch.split(fields, list(parts(fields.shape[-1])), dim=-1)
    ]
    return torch.cat(packed, -1)
