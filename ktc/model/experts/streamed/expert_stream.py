"""A layer's packed experts, or some of them, sent to a GPU in chunks of neighbours through its ring.

In: packed bytes of any format, on one NUMA node. Out: the matrices of neighbouring experts, chunk after chunk, decoded
on the device or as codes that it multiplies. The bus carries the stored bytes. Without `resident`, no expert stays on
the device beyond its time in the ring.
Refused: weights that are cut for several NUMA nodes (`ValueError`), codes that the device multiplies wrongly (H247).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from ktc.model.experts.kept.chosen_experts import check_chosen
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.products.coded_check import check_products
from ktc.model.experts.products.packed_layout import Matrices, PackedLayout
from ktc.model.experts.products.resident_weights import ResidentBytes, ResidentMatrices, ResidentWeights
from ktc.model.experts.products.row_check import check_rows
from ktc.model.experts.streamed.stream_ring import Gather, GatheredSource, NearBytes, StreamSource, ring_of
from ktc.model.experts.streamed.stream_sizes import DEFAULT_BUFFER, ChunkBytes, Chunks, chunk_bytes, ring_bytes
from ktc.model.kernels.form import ExpertsForm

_GATHERED: Final = 64 << 20  # bytes of experts of one call that a copy takes longer for than Python for their products


class ExpertStream:
    """The experts of `share`, neighbours of one layer, sent to `device` through a ring of `buffer` bytes.

    Those that are `resident` are sent at their first use, and stay on the device (`resident_weights.py`).
    """

    def __init__(
        self, experts: PackedExperts, form: ExpertsForm, device: torch.device, buffer: int, share: range,
        *, resident: bool,
    ) -> None:  # fmt: skip
        if experts.num_nodes > 1:
            raise ValueError("experts that are cut for several NUMA nodes cannot be sent: compile with `numa = none`")
        _, hidden, intermediate, _ = experts.sizes
        self.device, self.share, self.num_experts = device, share, experts.sizes.num_experts
        self.form = form
        form = replace(form, transposed=False)
        self._layout = PackedLayout(form, hidden, intermediate, *experts.panels, experts.weight_dtype)
        self._experts = weakref.ref(experts)
        self._bytes, self._item = self._layout.nbytes, experts.dtype.itemsize
        assert self._bytes * experts.sizes.num_experts == experts.nbytes, "the layout is not the kernel's"
        check_products(experts, device)
        check_rows(form, device)
        if resident:
            check_chosen(experts, form, device)
        decoded = experts.dtype.itemsize * (self._layout.parts + 1) * hidden * intermediate
        self._chunk = chunk_bytes_on(device, buffer or DEFAULT_BUFFER)
        self._runs = Chunks(decoded, self._bytes, self._chunk.matrices, buffer, experts.is_plain).cut(share)
        pieces = [experts.packed[run.start * self._bytes : run.stop * self._bytes] for run in self._runs]
        self._source = StreamSource(experts.packed, pieces, experts)
        holds = ResidentMatrices if experts.is_plain else ResidentBytes
        self._resident: ResidentWeights | None = holds(device, self._layout, pieces) if resident else None
        self._ring = None if resident else ring_of(device, ring_bytes(buffer, self._bytes))

    def is_near(self, near: NearBytes | None) -> None:
        """Take experts that the device keeps from there, beside the bus."""
        self._source.is_near(near)

    def prepare(self) -> None:
        """Take the memory on the device that the weights need."""
        if self._resident is not None:
            self._resident.send()

    def renew(self, *, sent: bool) -> None:
        """Forget pieces that were sent ahead; with `sent`, send resident ones again to where they are."""
        if self._ring is not None:
            self._ring.forget()
        elif self._resident is not None and sent:
            self._resident.renew()

    @property
    def resident(self) -> ResidentWeights:
        """The weights on the device. They have to stay there."""
        assert self._resident is not None, "the weights are sent for each call"
        return self._resident

    @property
    def is_one_chunk(self) -> bool:
        """Whether all experts of the share are one chunk."""
        return len(self._runs) == 1

    @property
    def most_rows(self) -> int:
        """The rows that a chunk's products are to have at once."""
        sizes = self._layout
        return max(1, self._chunk.rows // (max(sizes.hidden, sizes.parts * sizes.intermediate) * self._item))

    def chunks(self, chosen: Sequence[int], *, reverse: bool = False) -> Iterator[tuple[range, Matrices]]:
        """Yield the runs of neighbours that have experts of `chosen`, with their matrices, in order or in reverse."""
        wanted = [number for number, run in enumerate(self._runs) if any(expert in run for expert in chosen)]
        ordered = wanted[::-1] if reverse else wanted
        if self._resident is not None:
            self._resident.send()
            yield from ((self._runs[number], self._resident.matrices(number)) for number in ordered)
            return
        assert self._ring is not None, "weights that do not stay pass through a ring"
        with self._ring.visit(self._source, wanted, reverse=reverse) as take:
            for number in ordered:
                run = self._runs[number]
                yield run, self._layout.matrices(take(number).view(len(run), self._bytes))

    def gathered(self, experts: Sequence[int], gather: Gather) -> Iterator[tuple[range, Matrices]]:
        """Yield runs of places in `experts`, which are any, with at least as many matrices, in order.

        They are sent for this call alone, by `gather`, and nothing is sent ahead beside them.
        """
        packed = self._experts()
        assert self._ring is not None and packed is not None, "experts that do not stay, of a layer that is there"
        size = min(len(self._runs[0]), max(1, _GATHERED // self._bytes))
        runs = [range(first, min(first + size, len(experts))) for first in range(0, len(experts), size)]
        groups = [experts[run.start : run.stop] for run in runs]
        source = GatheredSource(self._source.storage, packed, groups, size * self._bytes, gather)
        with self._ring.visit(source, range(len(runs)), foreseen=False) as take:
            for number, run in enumerate(runs):
                yield run, self._layout.matrices(take(number).view(size, self._bytes))


@functools.cache
def chunk_bytes_on(device: torch.device, buffer: int = DEFAULT_BUFFER) -> ChunkBytes:
    """Return the bytes of a chunk on a device beside such a ring, by the memory that this process can have there.

    A plan counts the same: what weights have taken before the first call makes chunks no smaller.
    """
    if device.type != "cuda":
        return chunk_bytes(0, buffer)
    return chunk_bytes(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device), buffer)


_Key = tuple[ExpertsForm, torch.device, int, range, bool, int, ChunkBytes]
_made: Final[weakref.WeakKeyDictionary[PackedExperts, dict[_Key, ExpertStream]]] = weakref.WeakKeyDictionary()


def expert_stream(
    experts: PackedExperts, form: ExpertsForm, device: torch.device, buffer: int = DEFAULT_BUFFER,
    share: range | None = None, *, resident: bool = False,
) -> ExpertStream:  # fmt: skip
    """Return the stream of a layer's experts, or of a share of them: the same one for all calls."""
    share = share or range(experts.sizes.num_experts)
    buffer = 0 if resident else buffer  # those that stay need no ring, and are there once
    key = (
        form,
        device,
        buffer,
        share,
        resident,
        experts.packed.data_ptr(),
        chunk_bytes_on(device, buffer or DEFAULT_BUFFER),
    )
    streams = _made.setdefault(experts, {})
    if key not in streams:
        streams[key] = ExpertStream(experts, form, device, buffer, share, resident=resident)
    return streams[key]


def renew_streams(experts: PackedExperts, *, sent: bool) -> None:
    """Make all streams of a layer forget pieces sent ahead; with `sent`, renew their copies on devices."""
    for stream in _made.get(experts, {}).values():
        stream.renew(sent=sent)
