"""A layer's packed experts sent to a GPU in chunks, the next on its way while the last is multiplied.

In: packed bytes of any format, on one NUMA node. Out: the matrices of neighbouring experts, chunk after chunk, decoded
on the device. The bus carries the stored bytes. No expert stays on the device: a layer takes no more memory there than
two chunks as they are stored and one decoded.
Refused (`ValueError`): weights that are cut for several NUMA nodes.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.experts.form import ExpertsForm
from ktc.experts.packed import PackedExperts
from ktc.experts.packed_layout import Matrices, PackedLayout
from ktc.experts.panels import panels_of

log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 128 << 20  # of decoded matrices: enough rows for a grouped product, little beside a model
_PORTABLE: Final = 1  # of cudaHostRegister: for all contexts of the process


class ExpertStream:
    """The experts of one layer, sent to `device`. Raises `ValueError` for weights that cannot be sent."""

    def __init__(self, experts: PackedExperts, form: ExpertsForm, device: torch.device) -> None:
        if experts.num_nodes > 1:
            raise ValueError("experts that are cut for several NUMA nodes cannot be sent: compile with `numa = none`")
        self.num_experts, hidden, intermediate, _ = experts.sizes
        self.form, self.device = replace(form, transposed=False), device
        first, down = (panels_of(*experts.stored(part)) for part in ("up", "down"))
        self._layout = PackedLayout(self.form, hidden, intermediate, first, down, experts.weight_dtype)
        self._experts = experts
        self._bytes = self._layout.nbytes
        assert self._bytes * self.num_experts == experts.nbytes, "the layout is not the kernel's"
        self._most = max(1, _CHUNK_BYTES // (experts.dtype.itemsize * (self._layout.parts + 1) * hidden * intermediate))

    def chunks(self, numbers: Sequence[int]) -> Iterator[tuple[range, Matrices]]:
        """Yield runs of neighbours among the experts of `numbers`, in ascending order, with their matrices."""
        packed, runs = self._experts.packed, _runs(numbers, self._most)
        if self.device.type != "cuda":
            for run in runs:
                yield run, self._matrices(run, self._slice(packed, run))
            return
        _page_lock(self._experts, self.device)
        lane = _lane(self.device, self._most * self._bytes)
        following = lane.send(self._slice(packed, runs[0])) if runs else None
        for number, run in enumerate(runs):
            sent = following
            assert sent is not None
            following = lane.send(self._slice(packed, runs[number + 1])) if number + 1 < len(runs) else None
            matrices = self._matrices(run, sent.received())
            sent.release()
            yield run, matrices

    def _slice(self, packed: Tensor, run: range) -> Tensor:
        return packed[run.start * self._bytes : run.stop * self._bytes]

    def _matrices(self, run: range, packed: Tensor) -> Matrices:
        return self._layout.matrices(packed.view(len(run), self._bytes))


def _runs(numbers: Sequence[int], most: int) -> list[range]:
    """Join neighbours to runs of at most `most` experts, in ascending order: one copy sends one run."""
    runs: list[range] = []
    for expert in sorted(numbers):
        if runs and runs[-1].stop == expert and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, expert + 1)
        else:
            runs.append(range(expert, expert + 1))
    return runs


_tried: Final[set[tuple[int, int]]] = set()  # address and size of every storage given to `_page_lock`


def _page_lock(experts: PackedExperts, device: torch.device) -> None:
    """Lock a layer's storage once, so that the bus reads it at full speed while the GPU computes.

    The lock ends with the experts: those of another model may get the same address, and the bus would read old ones.
    """
    region = experts.packed.data_ptr(), experts.packed.nbytes
    if region in _tried:
        return
    _tried.add(region)
    status = int(cast("Any", torch.cuda.cudart()).cudaHostRegister(*region, _PORTABLE))
    if status != 0:
        log.warning("experts could not be page-locked (CUDA error %d): sending them to the GPU is slow", status)
    weakref.finalize(experts, _unlock, region, device if status == 0 else None).atexit = False  # CUDA ends before


def _unlock(region: tuple[int, int], device: torch.device | None) -> None:
    _tried.discard(region)
    if device is not None:
        torch.cuda.synchronize(device)  # what it still copies
        cast("Any", torch.cuda.cudart()).cudaHostUnregister(region[0])


class _Sent:
    """A chunk on its way to one of a lane's buffers."""

    def __init__(self, buffer: _Buffer, chunk: Tensor, arrived: torch.cuda.Event) -> None:
        self._buffer, self._chunk, self._arrived = buffer, chunk, arrived

    def received(self) -> Tensor:
        """Return the chunk, for the current stream."""
        torch.cuda.current_stream(self._chunk.device).wait_event(self._arrived)
        return self._chunk

    def release(self) -> None:
        """Free the chunk after the work that the current stream has now."""
        self._buffer.free.record(torch.cuda.current_stream(self._chunk.device))


@dataclass(frozen=True, slots=True)
class _Buffer:
    memory: Tensor
    free: torch.cuda.Event


class _Lane:
    """Two buffers on a GPU that chunks come to in turn, and the stream that brings them."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._stream = torch.cuda.Stream(device)
        made = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        self._buffers = [_Buffer(memory, torch.cuda.Event()) for memory in made]
        for buffer in self._buffers:  # its memory was another tensor's, which the current stream may still read
            buffer.free.record(torch.cuda.current_stream(device))

    def send(self, packed: Tensor) -> _Sent:
        """Begin to copy into the buffer that was used before the last one, once nothing reads it any more."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        self._stream.wait_event(buffer.free)
        chunk = buffer.memory[: packed.nbytes]
        with torch.cuda.stream(self._stream):
            chunk.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return _Sent(buffer, chunk, arrived)


@functools.cache
def _lane(device: torch.device, size: int) -> _Lane:
    """Return the lane of all layers with experts of a size."""
    return _Lane(device, size)
