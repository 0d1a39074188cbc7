"""Packed experts read without the kernel: the matrices in an expert's packed bytes, in every format.

The library's own `unpack` defines the layout (`runtime/include/ktc/weight_format/layout.hpp`). Here the same is done by
tensor operations, which run on the device of the bytes. A test compares the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ktc.model.experts.gpu.compiled_functions import compiled_on
from ktc.model.experts.layouts.coded_matrices import CodedMatrices, addressed_codes, are_coded
from ktc.model.experts.layouts.panel_codes import Cuts, cuts_of
from ktc.model.experts.layouts.panels import WIDTH, Panels, by_output, cut
from ktc.model.experts.products.grouped_products import decoded, multiplies_codes
from ktc.model.kernels.form import ExpertsForm


class Matrices(NamedTuple):
    """The weights of G experts: (G, parts * I, H), (G, H, I), and their biases (G, parts * I), (G, H)."""

    gate_up: Tensor | CodedMatrices
    down: Tensor | CodedMatrices
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def of(self, experts: slice) -> Matrices:
        """Return views of the weights of some experts."""
        return Matrices(*(None if tensor is None else tensor[experts] for tensor in self))  # pyright: ignore[reportArgumentType]

    def decoded(self, ends: Tensor) -> Matrices:
        """Return the weights as tensors; those of experts without rows are undefined (`grouped_products.decoded`)."""
        return self._replace(gate_up=decoded(self.gate_up, ends), down=decoded(self.down, ends))


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The positions of one expert's matrices in its packed bytes. `form` gives the order of gate_up's rows."""

    form: ExpertsForm
    hidden: int
    intermediate: int
    first: Panels  # of gate and up
    down: Panels
    bias_dtype: torch.dtype

    @property
    def parts(self) -> int:
        """Gate and up, or up alone."""
        return 2 if self.form.gated else 1

    @property
    def nbytes(self) -> int:
        """Count the bytes of one expert."""
        return self._first_bytes + self._down_bytes + self._bias_values * self.bias_dtype.itemsize

    def matrices(self, packed: Tensor) -> Matrices:
        """Read the matrices of experts: uint8 (G, bytes of one), on any device.

        Codes that the device multiplies as they are stay in these bytes. Others become copies there, by a function that
        is compiled for each G on a GPU.
        """
        if self.is_coded and multiplies_codes(packed.device):
            return self.coded(packed)
        return compiled_on(packed.device, _reader(self), dynamic=False)(packed)

    @property
    def is_coded(self) -> bool:
        """Whether a GPU can multiply the weights as they are stored (`coded_matrices`)."""
        return are_coded(self.first, self.down)

    def coded(self, packed: Tensor) -> Matrices:
        """Return the matrices as the codes in the bytes of experts: uint8 (G, bytes of one)."""
        down = CodedMatrices(
            packed, self.down, self._first_bytes, self._padded_hidden // WIDTH, self.hidden, self.intermediate
        )
        gate_up = replace(
            down, panels=self.first, begin=0, num_panels=self._first_panels, rows=self.intermediate,
            columns=self.hidden, parts=self.parts, interleaved=self.form.interleaved,
        )  # fmt: skip
        return Matrices(gate_up, down, *self._biases(packed))

    @property
    def cuts(self) -> Cuts:
        """Where one expert of a step may be cut."""
        return cuts_of(self.intermediate, addressed_codes(self.down))

    @property
    def bias_places(self) -> tuple[int, int]:
        """The first bytes of the two biases, which are in the order of the panels' outputs."""
        first = self._first_bytes + self._down_bytes
        return first, first + self._first_panels * WIDTH * self.bias_dtype.itemsize

    def read(self, packed: Tensor) -> Matrices:
        """Read the matrices step by step."""
        ends = self._first_bytes, self._first_bytes + self._down_bytes
        first = self._steps(self.first, packed[:, : ends[0]], self._first_panels, self._padded_hidden)
        lanes = cut(first, -2, self.parts, -1)  # (G, panels, steps, parts, lanes, neighbours)
        rows = by_output(lanes.permute(0, 3, 1, 2, 4, 5), self.hidden).flatten(2, 3)
        gate_up = self._ordered(rows).contiguous()
        down = self._steps(
            self.down, packed[:, ends[0] : ends[1]], self._padded_hidden // WIDTH, self._padded_intermediate
        )
        down_rows = by_output(down, self.intermediate).flatten(1, 2)[:, : self.hidden].contiguous()
        return Matrices(gate_up, down_rows, *self._biases(packed))

    def _biases(self, packed: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not self.form.biased:
            return None, None
        values = packed[:, self._first_bytes + self._down_bytes :].view(self.bias_dtype)
        of_panels = cut(values[:, : self._first_panels * WIDTH], 1, self._first_panels, self.parts, -1)
        gate_up_bias = self._ordered(of_panels.transpose(1, 2).flatten(2, 3))
        return gate_up_bias, values[:, self._first_panels * WIDTH :][:, : self.hidden]

    @property
    def _padded_hidden(self) -> int:
        return -(-self.hidden // WIDTH) * WIDTH

    @property
    def _padded_intermediate(self) -> int:
        return -(-self.intermediate // WIDTH) * WIDTH

    @property
    def _first_panels(self) -> int:
        return self.parts * self._padded_intermediate // WIDTH

    @property
    def _first_bytes(self) -> int:
        return self._first_panels * self.first.nbytes(self._padded_hidden)

    @property
    def _down_bytes(self) -> int:
        return self._padded_hidden // WIDTH * self.down.nbytes(self._padded_intermediate)

    @property
    def _bias_values(self) -> int:
        return self.parts * self._padded_intermediate + self._padded_hidden if self.form.biased else 0

    def _steps(self, panels: Panels, packed: Tensor, count: int, columns: int) -> Tensor:
        """(G, bytes of `count` panels) -> (G, count, steps, 32 outputs, neighbours)."""
        return panels.steps(cut(packed, -1, count, -1), columns)

    def _ordered(self, parts: Tensor) -> Tensor:
        """(G, parts, padded I, ...) -> (G, parts * I, ...) in the order of the stock weight's rows."""
        parts = parts[:, :, : self.intermediate]
        return (parts.transpose(1, 2) if self.form.interleaved else parts).flatten(1, 2)


@functools.cache
def _reader(layout: PackedLayout) -> Callable[[Tensor], Matrices]:
    """Return `read` of a layout: the same function for all layers."""

    def read(packed: Tensor) -> Matrices:
        return layout.read(packed)

    return read
