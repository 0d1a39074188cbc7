"""Copies of pinned host memory to a device, chunk by chunk, as experts are streamed."""

from __future__ import annotations

from typing import Final

import torch

from ktc.tools.measure.figures import seconds

_CHUNK: Final = 128 << 20  # bytes of one copy


class Bus:
    """Copies of `size` bytes to a device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        pinned = device.type == "cuda"
        self._sources = [torch.empty(min(_CHUNK, size), dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._targets = [torch.empty_like(source, device=device) for source in self._sources]
        for source in self._sources:
            source.fill_(1)  # else all of its pages are one page of zeros

    def copy(self) -> float:
        """Return the seconds of one copy of all bytes."""
        return seconds(self.device, self.start)

    def start(self) -> None:
        """Enqueue a copy of all bytes; on a GPU it runs on its current stream."""
        for number, start in enumerate(range(0, self.size, _CHUNK)):
            self._chunk(number, start)

    def _chunk(self, number: int, start: int) -> None:
        size = min(_CHUNK, self.size - start)
        self._targets[number % 2][:size].copy_(self._sources[number % 2][:size], non_blocking=True)
