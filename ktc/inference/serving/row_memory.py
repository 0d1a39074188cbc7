"""`RowMemory`: keys and values of a running batch at fixed addresses, for steps that are captured once and replayed.

In: rows that join and leave. Out: `RowPlaces`, through which a step of the first slots reads and writes. All rows end
before one column, which a tensor on the device holds. So a row joins by a copy to the left of it, the last row takes
the place of one that leaves, and neither changes an address. Slots beyond the rows repeat the first: they choose its
experts and no others. Layers with a window have all positions too: masks leave the others out.
Refused (`unfit_row`): layers that share another's keys, and those that are not plain tensors of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.pages import LayerRow, PagePool
from ktc.inference.serving.row_cache import CachedRow
from ktc.model.attention.step_index import IndexedLayer, StepIndex, signs_on
from ktc.model.decode_steps.step_memory import StepLayer, capacity_for, rounded
from ktc.model.experts.layouts.packed import zeros_on_huge_pages

ROOM: Final = 16  # columns: the fewest steps between two moves of all rows
STANDING: Final = 1 << 29  # bytes: memory up to this size has room for rows that may come, so it seldom moves
_MOST_STANDING: Final = 1 << 31
_PART_STANDING: Final = 16  # of the bytes for the keys and values of all rows
_LONG: Final = 1024  # positions that a slot has without a row of that length
_LEFT: Final = 4  # the part of the unused columns that is left of the rows, where longer ones join without a move


def unfit_row(row: CachedRow) -> str:
    """Return why a row cannot be in a `RowMemory`, "" if it can."""
    for number, layer in enumerate(row.layers):
        if layer is None:
            return f"layer {number} of the cache has no keys and values of its own"
        if any(type(tensor) is not Tensor for tensor in layer):
            return f"layer {number} of the cache has codes"
    if len({tensor.device for layer in row.layers for tensor in layer or ()}) > 1:
        return "the layers of the cache are on several devices"
    return ""


def memory_shape(rows: int, longest: int) -> tuple[int, int]:
    """Return the fewest slots, and the positions of each, for `rows` rows, the longest with `longest` tokens."""
    return rounded(max(1, rows)), capacity_for(longest + ROOM)


def standing_bytes(cache_bytes: int | None) -> int:
    """Return the bytes of memory for rows to come, where all keys and values may take `cache_bytes`."""
    if cache_bytes is None:
        return STANDING
    return min(cache_bytes, _MOST_STANDING, max(STANDING, cache_bytes // _PART_STANDING))


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """The first slots of a memory as a step sees them: see `StepPlaces`. `present` (slots, capacity) hides padding."""

    position: Tensor
    cache: Cache
    tensors: tuple[Tensor, ...]
    present: Tensor


class RowMemory:
    """Memory (slots, heads, capacity, width) of every layer. `version` differs where addresses do."""

    pool: PagePool | None = None

    def __init__(
        self, most: int = 1, standing: int = STANDING, indexed: Mapping[int, IndexedLayer] | None = None
    ) -> None:  # fmt: skip
        """Make an empty one. Where they take at most `standing` bytes, it has slots for `most` rows, and long ones.

        Layers that are `indexed` have codes of their keys too.
        """
        self._indexed, self._means = dict(indexed or {}), list[Tensor]()
        self._uncoded = set[int]()  # rows whose keys have no codes yet
        self.lengths: list[int] = []
        self.version = 0
        self._most, self._standing, self._end = rounded(most), standing, 0
        # Keys and values of each layer in turn, then codes and scales of the indexed ones.
        self._sides: tuple[Tensor, ...] = ()
        self._windows: tuple[int | None, ...] = ()
        self._repeats = set[int]()  # slots that have the content of the first
        self._is_shown = False  # whether `present` has the rows

    @property
    def columns(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def slots(self) -> int:
        """The number of rows that it has room for."""
        return self._sides[0].shape[0] if self._sides else 0

    @property
    def capacity(self) -> int:
        """The number of positions of a slot."""
        return self._sides[0].shape[2] if self._sides else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(side.nbytes for side in self._sides)

    @property
    def slots_of_step(self) -> int:
        """The slots of the next step: rows are filled up to a power of two."""
        return rounded(max(1, len(self.lengths)))

    @property
    def has_column(self) -> bool:
        """Whether the next step has a column where the rows are."""
        return self._end < self.capacity

    @property
    def needs_move(self) -> bool:
        """Whether the next step has no column without other addresses."""
        return not self.has_column and self._is_small(len(self.lengths), self.columns)

    # Rows ------------------------------------------------------------------------------------------------------------
    def hold(self, row: CachedRow, beginning: CachedRow | None = None) -> CachedRow:
        """Return a copy of a row, for `join` and for later requests."""
        return row.clone()

    def join(self, row: CachedRow) -> None:
        """Add a sequence after the others. Where memory is missing, the others stay as they are."""
        rows, longest = len(self.lengths), max(self.columns, row.length)
        if not self._sides:
            self._allocate(row)
        elif self._is_small(rows + 1, longest):
            self._move(rows + 1, longest)
        elif row.length > self._end or not rows:
            self._shift(longest)
        for at, side in enumerate(self._sides):
            side[rows].zero_()  # masked values are still multiplied, by 0: an old NaN would stay one
            if at < 2 * len(row.layers):
                layer = row.layers[at // 2]
                assert layer is not None
                part = layer[at % 2]
                side[rows, :, self._end - part.shape[1] : self._end] = part
        self.lengths.append(row.length)
        self._uncoded.add(rows)
        self._repeats.discard(rows)
        self._is_shown = False

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        last = len(self.lengths) - 1
        if at != last:
            for side in (*self._sides, *self._means):
                side[at] = side[last]
        if last in self._uncoded:
            self._uncoded.add(at)
        elif at != last:
            self._uncoded.discard(at)
        self._uncoded.discard(last)
        if at == 0:
            self._repeats.clear()
        self.lengths[at] = self.lengths[last]
        self.lengths.pop()
        self._is_shown = False

    def clear(self) -> None:
        """Remove all sequences."""
        self.lengths.clear()
        self._uncoded.clear()
        self._repeats.clear()
        self._is_shown = False

    def row(self, at: int, length: int | None = None) -> CachedRow:
        """Return a copy of a sequence, or of its first `length` tokens. A layer with a window keeps the last ones."""
        length = self.lengths[at] if length is None else length
        end, layers = self._end - self.lengths[at] + length, list[LayerRow | None]()
        for number, window in enumerate(self._windows):
            first = end - (length if window is None else min(length, window - 1))
            layers.append(LayerRow(*(side[at, :, first:end].clone() for side in self._sides[2 * number :][:2])))
        return CachedRow(length, tuple(layers), self._windows)

    def compact(self) -> None:
        """Release memory that the rows do not need."""
        if not self.lengths:
            self._sides, self.version = (), self.version + 1
            self._repeats.clear()
            return
        slots, capacity = memory_shape(len(self.lengths), self.columns)
        if self.slots > 2 * slots or self.capacity > 2 * capacity:
            self._move_to(slots, capacity, self.columns)

    # Steps -----------------------------------------------------------------------------------------------------------
    def begin_step(self, slots: int = 0) -> int:
        """Make room for the next token of every row. Return the slots of the step: a power of two, at least `slots`."""
        rows = len(self.lengths)
        if self._end == self.capacity:
            self._make_room(rows)
        self._encode()
        slots = min(max(self.slots_of_step, slots), self.slots)
        missing = [slot for slot in range(rows, slots) if slot not in self._repeats]
        if missing:
            for side in (*self._sides, *self._means):
                side[missing[0] : missing[-1] + 1] = side[:1]
        self._repeats = set(range(rows, slots))  # those beyond do not get the token of this step
        if not self._is_shown:
            firsts = [self._end - length for length in (*self.lengths, *self.lengths[:1] * (self.slots - rows))]
            first = torch.tensor(firsts, device=self._present.device)[:, None]
            self._present.copy_(torch.arange(self.capacity, device=first.device) >= first)
            self._is_shown = True
        self._position.fill_(self._end)
        return slots

    def appended(self) -> None:
        """Count the token that a step has appended to every sequence."""
        self.lengths = [length + 1 for length in self.lengths]
        self._end += 1

    def places(self, slots: int) -> RowPlaces:
        """Return the first slots for a step."""
        sides = [side[:slots] for side in self._sides]
        indices = {number: index.first(slots) for number, index in self._indices().items()}
        layers = [
            StepLayer(
                sides[2 * number], sides[2 * number + 1], self._position, is_sliding=window is not None,
                index=indices.get(number),
            )
            for number, window in enumerate(self._windows)
        ]  # fmt: skip
        cache = Cache(layers=cast("Any", layers))
        means = (mean[:slots] for mean in self._means)
        return RowPlaces(self._position, cache, (self._position, *sides, *means), self._present[:slots])

    def _indices(self) -> dict[int, StepIndex]:
        """Return the codes of the indexed layers, all slots."""
        first = 2 * len(self._windows)
        return {
            number: StepIndex(*self._of_index(first + 2 * at), self._means[at], signs_on(self._means[at]))
            for at, number in enumerate(self._indexed)
        }

    def _of_index(self, at: int) -> tuple[Tensor, Tensor]:
        codes, scales = self._sides[at : at + 2]
        return codes, scales[..., 0]

    def _encode(self) -> None:
        """Write the codes of rows that wait for theirs."""
        if self._uncoded and self._indexed:
            for number, index in self._indices().items():
                if self._indexed[number].budget >= self.capacity:
                    continue  # its steps read all positions, and write no codes
                keys, values = self._sides[2 * number : 2 * number + 2]
                for row in self._uncoded:
                    columns = slice(self._end - self.lengths[row], self._end)
                    self._indexed[number].encode(index, keys, values, row, columns)
        self._uncoded.clear()

    # Memory ----------------------------------------------------------------------------------------------------------
    def _is_small(self, rows: int, longest: int) -> bool:
        return rows > self.slots or longest + ROOM > self.capacity

    def _allocate(self, row: CachedRow) -> None:
        """Make memory for rows such as this one."""
        self._sides = tuple(
            tensor.new_zeros((0, tensor.shape[0], 0, tensor.shape[2])) for layer in row.layers for tensor in layer or ()
        )
        of_indices = [of.index(*self._sides[2 * number : 2 * number + 2]) for number, of in self._indexed.items()]
        self._sides += tuple(side for index in of_indices for side in (index.codes, index.scales[..., None]))
        self._means = [index.mean for index in of_indices]
        self._windows = row.windows
        self._move(1, row.length)

    def _move(self, rows: int, longest: int) -> None:
        """Copy the rows to memory for `rows` rows, and for more and longer ones where memory is there."""
        least = memory_shape(rows, longest)
        roomy = self._with_room(*least)
        if roomy != least:
            try:
                self._move_to(*roomy, longest)
                return
            except (MemoryError, RuntimeError) as error:
                if memory_fault(error) is None:
                    raise
        self._move_to(*least, longest)

    def _with_room(self, slots: int, capacity: int) -> tuple[int, int]:
        """Return slots for all rows that may come, then positions for long ones, as far as `standing` bytes reach."""
        column = sum(side.shape[1] * side.shape[3] * side.itemsize for side in self._sides)
        while slots < self._most and 2 * slots * capacity * column <= self._standing:
            slots *= 2
        while slots >= self._most and capacity < _LONG and 2 * slots * capacity * column <= self._standing:
            capacity *= 2
        return slots, capacity

    def _move_to(self, slots: int, capacity: int, longest: int) -> None:
        columns, end, used = self.columns, _end_for(longest, capacity), len(self.lengths)
        if any(self.capacity <= of.budget < capacity for of in self._indexed.values()):
            self._uncoded = set(range(used))  # steps of a capacity up to the budget have written no codes
        moved = list[Tensor]()
        for side in self._sides:
            memory = zeros_on_huge_pages((slots, side.shape[1], capacity, side.shape[3]), side)
            memory[:used, :, end - columns : end] = side[:used, :, self._end - columns : self._end]
            moved.append(memory)
        self._means = [F.pad(mean[:used], (0, 0, 0, 0, 0, slots - used)) for mean in self._means]
        device = moved[0].device
        self._present = torch.zeros((slots, capacity), dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._sides, self._end, self.version = tuple(moved), end, self.version + 1
        self._repeats.clear()
        self._is_shown = False

    def _make_room(self, rows: int) -> None:
        """Let all rows end further to the left, in more memory where there is no room."""
        if self._is_small(rows, self.columns):
            self._move(rows, self.columns)
        else:
            self._shift(self.columns)

    def _shift(self, longest: int) -> None:
        """Let all rows end where one of `longest` tokens has room, at the same addresses."""
        columns, end, used = self.columns, _end_for(longest, self.capacity), len(self.lengths)
        if used:
            for side in self._sides:
                kept = side[:used, :, self._end - columns : self._end].clone()
                side[:used, :, end - columns : end] = kept
        self._end = end
        self._repeats.clear()
        self._is_shown = False


def _end_for(longest: int, capacity: int) -> int:
    return longest + (capacity - longest) // _LEFT
