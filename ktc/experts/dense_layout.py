"""Packed experts read without the kernel: where one expert's bytes have its weights, for a format without codes.

The library's own `unpack` is the meaning (`runtime/include/ktc/weight_format/layout.hpp`); this is the same as tensor
operations, so that it runs where the bytes are, on a GPU too. A test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.experts.form import ExpertsForm

_PANEL: Final = 32  # outputs of a panel of packed weights; half of them are gate's where there is a gate
_DEPTH: Final = {torch.bfloat16: 2, torch.float32: 1, torch.float64: 1}  # neighbours of the contraction side by side

# Of one expert: (parts * I, H), (H, I), and their biases.
Matrices = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """The positions of one expert's matrices in its packed bytes; H, I, and the same rounded up to whole panels."""

    form: ExpertsForm
    hidden: int
    intermediate: int
    dtype: torch.dtype
    bias_dtype: torch.dtype

    @property
    def padded_hidden(self) -> int:
        """H in whole panels."""
        return -(-self.hidden // _PANEL) * _PANEL

    @property
    def padded_intermediate(self) -> int:
        """I in whole panels."""
        return -(-self.intermediate // _PANEL) * _PANEL

    @property
    def parts(self) -> int:
        """Gate and up, or up alone."""
        return 2 if self.form.gated else 1

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        inner, outer = self.padded_intermediate, self.padded_hidden
        biases = (self.parts * inner + outer) * self.bias_dtype.itemsize if self.form.biased else 0
        return (self.parts + 1) * inner * outer * self.dtype.itemsize + biases

    def matrices(self, packed: Tensor) -> Matrices:
        """Read one expert's uint8 bytes as (parts * I, H), (H, I) and their biases, ordered as the form says.

        Copies, on the device of `packed`.
        """
        depth, item = _DEPTH[self.dtype], self.dtype.itemsize
        rows, lanes = self.parts * self.padded_intermediate, _PANEL // self.parts
        ends = [rows * self.padded_hidden * item]
        ends.append(ends[0] + self.padded_hidden * self.padded_intermediate * item)
        panels = packed[: ends[0]].view(self.dtype).view(-1, self.padded_hidden // depth, self.parts, lanes, depth)
        gate_up = self._ordered(panels.permute(2, 0, 3, 1, 4).reshape(self.parts, -1, self.padded_hidden))
        panels = packed[ends[0] : ends[1]].view(self.dtype).view(-1, self.padded_intermediate // depth, _PANEL, depth)
        down = panels.permute(0, 2, 1, 3).reshape(self.padded_hidden, -1)[: self.hidden, : self.intermediate]
        if not self.form.biased:
            return gate_up[:, : self.hidden], down, None, None
        ends.append(ends[1] + rows * self.bias_dtype.itemsize)
        bias = packed[ends[1] : ends[2]].view(self.bias_dtype).view(-1, self.parts, lanes)
        down_bias = packed[ends[2] :].view(self.bias_dtype)[: self.hidden]
        gate_up_bias = self._ordered(bias.permute(1, 0, 2).reshape(self.parts, -1))
        return gate_up[:, : self.hidden], down, gate_up_bias.to(self.dtype), down_bias.to(self.dtype)

    def _ordered(self, parts: Tensor) -> Tensor:
        """(parts, padded I, ...) -> (parts * I, ...) in the order of the stock weight's rows."""
        parts = parts[:, : self.intermediate]
        return (parts.transpose(0, 1) if self.form.interleaved else parts).flatten(0, 1)
