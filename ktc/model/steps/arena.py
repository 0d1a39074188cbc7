"""The memory of a program: one block in which the tensors between its operations have places that are reused.

In: a recording. Out: for each of its tensors one with the same sizes and strides. It is in the block if the step
allocated it, otherwise it is the tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from ktc.model.steps.recording import Recording, storage

_ALIGNMENT: Final = 64  # bytes: a line of the cache


class Arena:
    """Places of tensors. `kept` are tensors of the step that are read after its last operation."""

    def __init__(self, recording: Recording, kept: Sequence[Tensor]) -> None:
        self._offsets, size = _places(recording, kept)
        self._block = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8)
        self._start = -self._block.data_ptr() % _ALIGNMENT
        self._placed: dict[int, Tensor] = {}
        self.nbytes = size

    def __getitem__(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the program that stands for one of the recording."""
        offset = self._offsets.get(storage(tensor))
        if offset is None:
            return tensor
        if id(tensor) not in self._placed:
            begin = self._start + offset
            nbytes = tensor.untyped_storage().nbytes() // tensor.element_size() * tensor.element_size()
            values = self._block[begin : begin + nbytes].view(tensor.dtype)
            first = values.storage_offset() + tensor.storage_offset()
            self._placed[id(tensor)] = values.as_strided(tensor.size(), tensor.stride(), first)
        return self._placed[id(tensor)]

    def restore(self, tensor: Tensor) -> None:
        """Give the place of a recorded tensor the bytes of its storage."""
        offset = self._offsets.get(storage(tensor))
        if offset is not None:
            recorded = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            begin = self._start + offset
            self._block[begin : begin + recorded.numel()] = recorded


def _places(recording: Recording, kept: Sequence[Tensor]) -> tuple[dict[int, int], int]:
    """Return an offset for every storage of the step, and the bytes of all. Two may share bytes if one ends first."""
    lives: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    for number, operation in enumerate(recording.operations):
        for tensor in (*operation.reads, *operation.writes):
            place = storage(tensor)
            if place in recording.inner:
                lives[place] = lives.get(place, (number, number))[0], number
                sizes[place] = -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    for tensor in kept:
        if storage(tensor) in lives:
            lives[storage(tensor)] = lives[storage(tensor)][0], len(recording.operations)
    offsets: dict[int, int] = {}
    alive: list[tuple[int, int, int]] = []  # end of life, offset, end of bytes
    for place, (begin, end) in sorted(lives.items(), key=lambda item: item[1]):
        alive = [life for life in alive if life[0] >= begin]
        offsets[place] = _first_gap(((at, until) for _, at, until in alive), sizes[place])
        alive.append((end, offsets[place], offsets[place] + sizes[place]))
    return offsets, max((offsets[place] + sizes[place] for place in offsets), default=0)


def _first_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    at = 0
    for begin, end in sorted(taken):
        if begin - at >= size:
            break
        at = max(at, end)
    return at
