"""Experts that stay on a device: their stored bytes, or their matrices where those take no more memory.

In: pieces of a layer's packed bytes, each of neighbouring experts. They are sent at the first use, once. Out: the
matrices of a piece. Plain weights stay in the order that products read, so that no call unpacks them. Others stay as
they are stored; the device multiplies their codes, or they are decoded for each call (`PackedLayout.matrices`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ktc.model.experts.products.grouped_products import multiplies_codes
from ktc.model.experts.products.packed_layout import Matrices, PackedLayout


class ResidentBytes:
    """The stored bytes of `pieces`, one behind the other."""

    def __init__(self, device: torch.device, layout: PackedLayout, pieces: Sequence[Tensor]) -> None:
        self._device, self._layout, self._sources = device, layout, tuple(pieces)
        self._whole = torch.empty(0, dtype=torch.uint8)
        self._places = torch.empty(0, dtype=torch.int64)
        self._pieces: tuple[Tensor, ...] = ()

    def send(self) -> None:
        """Send the pieces, once."""
        if not self._pieces:
            sizes = [piece.numel() for piece in self._sources]
            with torch.inference_mode(mode=False):  # for later calls with gradients
                self._whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
                self._pieces = torch.split(self._whole, sizes)
                first, nbytes = self._whole.data_ptr(), self._layout.nbytes
                numbers = torch.arange(self._whole.numel() // nbytes, device=self._device)
                self._places = first + numbers * nbytes
                self.renew()

    def renew(self) -> None:
        """Send the pieces again to where they are, if they were sent."""
        for target, piece in zip(self._pieces, self._sources, strict=False):
            target.copy_(piece)

    def matrices(self, number: int) -> Matrices:
        """Return the matrices of a piece, decoded for this call or as codes."""
        return self._layout.matrices(self._pieces[number].view(-1, self._layout.nbytes))

    @property
    def is_multiplied(self) -> bool:
        """Whether the device multiplies the codes as they are."""
        return self._layout.is_coded and multiplies_codes(self._device)

    def whole(self) -> Matrices:
        """Return the matrices of all experts as codes, see `is_multiplied`."""
        assert self.is_multiplied, "no call decodes a whole layer"
        self.send()
        return self._layout.matrices(self._whole.view(-1, self._layout.nbytes))

    @property
    def layout(self) -> PackedLayout:
        """The positions of matrices within an expert."""
        return self._layout

    @property
    def places(self) -> Tensor:
        """The address of each expert (E,) int64."""
        self.send()
        return self._places

    def copies(self, experts: Tensor) -> Matrices:
        """Return the matrices of experts (S,) int64, which may repeat: copies, made without waiting."""
        self.send()
        words = self._whole.view(torch.int64).view(-1, self._layout.nbytes // 8)  # eight bytes at once
        return self._layout.matrices(words.index_select(0, experts).view(torch.uint8))


class ResidentMatrices:
    """The matrices of `pieces`, whose weights are plain."""

    def __init__(self, device: torch.device, layout: PackedLayout, pieces: Sequence[Tensor]) -> None:
        self._device, self._layout, self._sources = device, layout, tuple(pieces)
        counts = [piece.numel() // layout.nbytes for piece in pieces]
        self._runs = [slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
        self._whole: Matrices | None = None
        self._places = torch.empty(0, dtype=torch.int64)

    def send(self) -> None:
        """Send the pieces, once."""
        if self._whole is None:
            count = self._runs[-1].stop
            with torch.inference_mode(mode=False):  # for later calls with gradients
                made = (None if part is None else part.new_empty((count, *part.shape[1:])) for part in self._read(0))
                self._whole = Matrices(*cast("tuple[Tensor, Tensor, Tensor, Tensor]", tuple(made)))
                self._places = torch.arange(count, device=self._device)
                self.renew()

    def renew(self) -> None:
        """Send the pieces again to where they are, if they were sent."""
        if self._whole is not None:
            for number, run in enumerate(self._runs):
                whole = cast("tuple[Tensor | None, ...]", self._whole.of(run))
                for target, source in zip(whole, self._read(number), strict=True):
                    if target is not None and source is not None:
                        target.copy_(source)

    @property
    def places(self) -> Tensor:
        """The number of each expert (E,) int64."""
        self.send()
        return self._places

    def matrices(self, number: int) -> Matrices:
        """Return the matrices of a piece: views."""
        return self.whole().of(self._runs[number])

    def whole(self) -> Matrices:
        """Return the matrices of all experts."""
        self.send()
        assert self._whole is not None, "the pieces were sent"
        return self._whole

    def _read(self, number: int) -> tuple[Tensor | None, ...]:
        """Read a piece step by step: nothing is compiled for what happens once."""
        bytes_of_experts = self._sources[number].to(self._device).view(-1, self._layout.nbytes)
        return cast("tuple[Tensor | None, ...]", self._layout.read(bytes_of_experts))


ResidentWeights = ResidentBytes | ResidentMatrices
