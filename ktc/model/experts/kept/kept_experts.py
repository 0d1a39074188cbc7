"""Single experts of any layer that a GPU keeps for decoding, and the tables that say where they are.

In: the packed experts of a model's layers, and how many experts the device has places for. Out: for each layer the
tensors that a step reads when it runs: addresses, the share of the bus, and counts that it adds to. Between two steps
`advance` exchanges experts by their counts: the one that leaves has no address from the next step on, its place is
written beside that step, and the other one has an address when it has arrived. No step waits for a copy.
With `fixed`, tables and share stay as they are, and results are equal to the bit from run to run.
Calls of many tokens pass a layer's experts through a ring; those that the device keeps get there from their places.
Packed experts whose pages cannot be locked are not read over the bus.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from ktc.model.experts.host.page_lock import page_lock
from ktc.model.experts.host.stream_copies import Arrival, Copies, Mark, copies_to
from ktc.model.experts.kept.kept_division import lead_of, least_of
from ktc.model.experts.kept.kept_policy import (
    BESIDE,
    DECAY,
    CallSums,
    Exchange,
    exchanges,
    first_kept,
    measured_line,
    no_slower,
    planned_line,
    share_beside,
)
from ktc.model.experts.layouts.coded_matrices import CodedMatrices, addressed_codes
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.layouts.panel_codes import MOST_PARTS
from ktc.model.experts.products.grouped_products import multiplies_codes
from ktc.model.experts.products.packed_layout import PackedLayout
from ktc.model.experts.references.kept_split import WHOLE_SHARE
from ktc.model.kernels.form import ExpertsForm

if TYPE_CHECKING:
    from ktc.model.experts.host.host_node import CpuReads, HostNodes

ENGINES: Final[tuple[str, ...]] = ("gpu", "bus", "cpu")  # in the order of a layer's traffic
PERIOD: Final = 32  # steps between two looks at the counts
MEASURED: Final = 8  # steps between two looks at the speed of the CPU
_ALIGNMENT: Final = 256  # bytes between which experts begin
MOST_ROWS: Final = 16  # of a step whose experts the GPU reads by address


@dataclass(frozen=True, slots=True)
class KeptTraffic:
    """The experts that the steps of a model have read, and their bytes, by engine: `gpu`, `bus`, `cpu`.

    An expert that two engines read in part counts as its parts.
    """

    experts: Mapping[str, float]
    nbytes: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Sent:
    """An expert on its way to the place of another one."""

    expert: int
    place: int
    arrival: Arrival


def _by_engine(of_layers: Tensor) -> dict[str, float]:
    amounts = cast("list[float]", of_layers.sum(0).tolist())
    return dict(zip(ENGINES, amounts, strict=True))


class KeptLayer:
    """The part of one layer in `KeptExperts`, as a step reads it."""

    def __init__(self, store: KeptExperts, number: int, packed: PackedExperts, form: ExpertsForm) -> None:
        self.store, self.number, self.packed, self.form = store, number, packed, form
        sizes = packed.sizes
        self.table, self.counts = (of[number, : sizes.num_experts] for of in (store.table, store.counts))
        self.traffic = store.traffic[number]
        self.layout = PackedLayout(form, sizes.hidden, sizes.intermediate, *packed.panels, packed.weight_dtype)
        assert self.layout.nbytes * sizes.num_experts == packed.nbytes, "the layout is not the kernel's"
        nothing = torch.empty(0, self.layout.nbytes, dtype=torch.uint8)
        self.matrices = cast("tuple[CodedMatrices, CodedMatrices]", self.layout.coded(nothing)[:2])

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Copies of a model compute without kept experts: their steps would share the tables."""

    def bytes_of(self, expert: int) -> Tensor:
        """Return the packed bytes of an expert, in host memory."""
        return self.packed.packed[expert * self.layout.nbytes : (expert + 1) * self.layout.nbytes]

    def send(self, copies: Copies, piece: Tensor, target: Tensor, after: Sequence[Mark]) -> tuple[Arrival, int]:
        """See `NearBytes.send`: a piece is some neighbouring experts."""
        size = self.layout.nbytes
        first = (piece.data_ptr() - self.packed.address) // size
        return self.gather(range(first, first + piece.nbytes // size), copies, target, after)

    def gather(
        self, experts: Sequence[int], copies: Copies, target: Tensor, after: Sequence[Mark]
    ) -> tuple[Arrival, int]:  # fmt: skip
        """Begin to copy experts to `target`, one behind the other: kept ones from their places.

        Return the bytes of those from host memory. A place is overwritten after the copies from it.
        """
        return self.store.send(self, experts, copies, target, after)

    def near(self) -> frozenset[int]:
        """Return the experts whose bytes are in their places."""
        return self.store.arrived(self)


def can_keep(packed: PackedExperts, device: torch.device) -> bool:
    """Return whether a device can multiply experts by their addresses, as they are packed."""
    fits = packed.num_nodes == 1 and packed.dtype == torch.bfloat16
    fits = fits and all(addressed_codes(panels) is not None for panels in packed.panels)
    fits = fits and (packed.address | packed.nbytes // packed.sizes.num_experts) % MOST_PARTS == 0  # see `split`
    return fits and (device.type == "cpu" or multiplies_codes(device))


_stores: Final[weakref.WeakSet[KeptExperts]] = weakref.WeakSet()


def renew_kept(packed: PackedExperts) -> None:
    """Send the experts of a layer again that devices keep."""
    for store in _stores:
        store.renew(packed)


class KeptExperts:
    """`places` experts of `layers` on a device, which one model uses. `share` is that of the bus at first."""

    def __init__(
        self, layers: Sequence[tuple[PackedExperts, ExpertsForm]], device: torch.device, places: int,
        *, share: float, fixed: bool,
    ) -> None:  # fmt: skip
        packed = [experts for experts, _ in layers]
        most = max(experts.sizes.num_experts for experts in packed)
        self.device, self.fixed = device, fixed
        self._nbytes = [experts.nbytes // experts.sizes.num_experts for experts in packed]
        self._place_bytes = -(-max(self._nbytes) // _ALIGNMENT) * _ALIGNMENT
        places = min(places, sum(experts.sizes.num_experts for experts in packed))
        with torch.inference_mode(mode=False):  # steps within it and outside write to them
            self._memory = torch.empty(places, self._place_bytes, dtype=torch.uint8, device=device)
            self.table = torch.zeros(len(layers), most, dtype=torch.int64, device=device)
            self.share = torch.zeros(3, dtype=torch.int32, device=device)  # and the lead, and the least
            self.counts = torch.zeros(len(layers), most, dtype=torch.int32, device=device)
            self.traffic = torch.zeros(len(layers), 3, dtype=torch.int64, device=device)
            self._addresses = torch.zeros(len(layers), most, dtype=torch.int64)  # of the next step
            self._weights = torch.zeros(len(layers), most)  # decayed counts
            self._seen = torch.zeros(len(layers), most, dtype=torch.int32)
        locked = device.type != "cuda" or all(page_lock(experts.packed, experts) for experts in packed)
        self._copies = copies_to(device)
        self._copies.keep(self._memory)
        self._bus_speed = self._copies.bus_speed(packed[0].packed) if locked else 0.0
        self._share = share if locked else 0.0
        self._line = self._plan = planned_line(self._share, self._bus_speed)
        self._calls = CallSums()
        self._share_out()
        self.layers = tuple(KeptLayer(self, number, *layer) for number, layer in enumerate(layers))
        self._places: dict[int, int] = {}  # by expert, those on their way included
        self._exchanges: deque[Exchange] = deque()
        self._sent: deque[_Sent] = deque()
        self._steps = 0
        self._counted: tuple[Tensor, Mark] | None = None  # counts on their way to the host
        self._turn = threading.Lock()  # of places: they are read beside the ring's thread
        self._readers: dict[Copies, Mark] = {}  # the last copy from a place, by the copies that made it
        self._reads_seen: weakref.WeakKeyDictionary[HostNodes, CpuReads] = weakref.WeakKeyDictionary()  # of each step
        self.place(self._weights)
        _stores.add(self)

    @property
    def num_places(self) -> int:
        """The number of experts that the device keeps."""
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._memory.nbytes

    @property
    def bus_share(self) -> float:
        """The share of the bus in the experts that the device does not keep."""
        return self._share

    def place(self, counts: Tensor) -> None:
        """Keep the most often chosen experts, by counts (layers, experts). Waits for the device and for the copies.

        The greatest count then weighs as an expert that every step so far has chosen, so that new choices outweigh it.
        """
        experts = torch.tensor([layer.packed.sizes.num_experts for layer in self.layers])
        missing = torch.arange(self.table.shape[1]) >= experts[:, None]
        self._copies.finish()
        self._exchanges.clear()
        self._sent.clear()
        self._weights = counts.float() * min(1.0, PERIOD / (1 - DECAY) / max(1.0, float(counts.max())))
        chosen = first_kept(counts.float().masked_fill(missing, -1.0), self.num_places)
        with self._turn:
            self._places = {expert: place for place, expert in enumerate(chosen)}
            self._addresses.zero_()
            for expert, place in self._places.items():
                self._send(expert, place)
                self._addresses.view(-1)[expert] = self._address(place)
            self._copies.finish()
        self.table.copy_(self._addresses)

    def send(
        self, layer: KeptLayer, experts: Sequence[int], copies: Copies, target: Tensor, after: Sequence[Mark]
    ) -> tuple[Arrival, int]:
        """See `KeptLayer.gather`."""
        size, packed, parts, sent = layer.layout.nbytes, layer.packed.packed, list[tuple[Tensor, Tensor]](), 0

        def source_of(numbered: tuple[int, int]) -> tuple[int, int]:
            """Return a place, or -1 and a number that neighbours in host memory share."""
            at, expert = numbered
            place = self._arrived(layer, expert)
            return (-1, expert - at) if place is None else (place, 0)

        with self._turn:
            for (place, _), run in itertools.groupby(enumerate(experts), source_of):
                (at, expert), *others = run
                begin, nbytes = at * size, (1 + len(others)) * size
                source = packed[expert * size :][:nbytes] if place < 0 else self._memory[place, :size]
                parts.append((source, target[begin : begin + nbytes]))
                sent += nbytes * (place < 0)
            arrival = copies.send_parts(parts, after)
            if sent < size * len(experts):
                copies.keep(self._memory)
                self._readers[copies] = arrival.mark
        return arrival, sent

    def arrived(self, layer: KeptLayer) -> frozenset[int]:
        """See `KeptLayer.near`."""
        with self._turn:
            addresses = cast("list[int]", self._addresses[layer.number].tolist())
        return frozenset(expert for expert, address in enumerate(addresses[: len(layer.table)]) if address)

    def _arrived(self, layer: KeptLayer, expert: int) -> int | None:
        """Return the place of an expert whose bytes are there, None for others."""
        number = layer.number * self.table.shape[1] + expert
        return self._places[number] if int(self._addresses.view(-1)[number]) else None

    def renew(self, packed: PackedExperts) -> None:
        """Send the kept experts of a layer again, whose weights have changed. Waits for the device."""
        self._copies.finish()
        for expert, place in self._places.items():
            if self.layers[expert // self.table.shape[1]].packed.address == packed.address:
                self._send(expert, place)
        self._copies.finish()

    def uses(self, nodes: HostNodes) -> None:
        """Measure the CPU by the host functions of a step."""
        self._reads_seen.setdefault(nodes, nodes.reads)

    # Between two steps

    def advance(self) -> None:
        """Use experts that have arrived, and begin to send at most one. No step waits for an expert.

        A step may be under way, for which the host does not wait: tables and share change behind it, in the order of
        the device's stream, and counts are looked at when they have arrived.
        """
        if self.fixed:
            return
        self._steps += 1
        changed = self._use_arrived()
        if self._steps % MEASURED == 1:
            self._follow_cpu()
        if self._steps % PERIOD == 0:
            self._request_counts()
        self._look()
        if self._sent or not self._exchanges:
            if changed:
                self._enqueue(self.table, self._addresses)
            return
        exchange = self._exchanges.popleft()
        with self._turn:
            place = self._places[exchange.entering] = self._places.pop(exchange.leaving)
            self._addresses.view(-1)[exchange.leaving] = 0
            self._enqueue(self.table, self._addresses)  # before the copy, which waits for what the device has to do
            self._sent.append(_Sent(exchange.entering, place, self._send(exchange.entering, place)))

    def figures(self) -> KeptTraffic:
        """Return what all steps have read. Waits for the device."""
        units = torch.tensor([layer.layout.intermediate for layer in self.layers], dtype=torch.float64)
        experts = self.traffic.cpu() / units[:, None]
        nbytes = _by_engine(experts * torch.tensor(self._nbytes, dtype=torch.float64)[:, None])
        return KeptTraffic(_by_engine(experts), {engine: round(amount) for engine, amount in nbytes.items()})

    def _use_arrived(self) -> bool:
        """Give addresses to experts that have arrived."""
        changed = False
        while self._sent and self._sent[0].arrival.is_over():
            sent = self._sent.popleft()
            self._addresses.view(-1)[sent.expert] = self._address(sent.place)
            changed = True
        return changed

    def _request_counts(self) -> None:
        """Begin to copy the counts of all steps so far to the host."""
        there = torch.empty(self.counts.shape, dtype=self.counts.dtype, pin_memory=self.counts.is_cuda)
        there.copy_(self.counts, non_blocking=True)
        self._counted = there, self._copies.mark()

    def _look(self) -> None:
        """Decide what is exchanged by the counts that have arrived, if any have."""
        if self._counted is None:
            return
        counts, mark = self._counted
        if mark is not None and not mark.query():
            return
        self._counted = None
        self._weights = self._weights * DECAY + (counts - self._seen)
        self._seen = counts
        kept = torch.zeros(self._weights.shape, dtype=torch.bool)
        kept.view(-1)[torch.tensor(list(self._places), dtype=torch.int64)] = True
        self._exchanges = deque(exchanges(self._weights, kept, PERIOD))

    def _follow_cpu(self) -> None:
        """Measure the CPU in the calls that have ended, and give the bus its share of the speed of both."""
        reads = {nodes: nodes.reads for nodes in self._reads_seen}
        pairs = [(after, self._reads_seen[nodes]) for nodes, after in reads.items()]
        nbytes, nanoseconds, calls, squares, products = (
            sum(now[at] - then[at] for now, then in pairs) for at in range(5)
        )
        self._reads_seen.update(reads)
        if self._steps > 1:  # until then libraries set themselves up
            new = CallSums(calls, nbytes, 1e-9 * nanoseconds, squares, 1e-9 * products)
            self._calls = self._calls.followed_by(no_slower(new, self._plan))
            self._line = measured_line(self._calls, self._plan, max(self._nbytes))
            self._share = share_beside(self._line, self._bus_speed)
            self._share_out()

    def _share_out(self) -> None:
        """Let the next step divide experts by the present share. With `fixed`, nothing depends on a measurement."""
        about = self._share, BESIDE * self._bus_speed, max(self._nbytes), self._line.call
        more = (0.0, 0.0) if self.fixed else (lead_of(*about), least_of(*about))
        numbers = [round(number * WHOLE_SHARE) for number in (self._share, *more)]
        shares = torch.tensor(numbers, dtype=torch.int32)
        self._enqueue(self.share, shares)

    def _enqueue(self, target: Tensor, values: Tensor) -> None:
        """Write values to the device behind what it has to do. The host does not wait, and may change `values`."""
        target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)

    def _send(self, expert: int, place: int) -> Arrival:
        layer, number = divmod(expert, self.table.shape[1])
        source = self.layers[layer].bytes_of(number)
        after = self._copies.mark(), *self._readers.values()
        return self._copies.send(source, self._memory[place, : source.nbytes], after)

    def _address(self, place: int) -> int:
        return self._memory.data_ptr() + place * self._place_bytes
