"""`PagePool`: keys and values of many sequences in pages of 128 positions, in memory that all of them share.

In: rows (heads, length, width) of numbers or of int8 codes, of several layers. Out: `Page`s, and the memory that
kernels read. A page has the same number in every layer. Sequences may share pages that are full, and each writes new
positions into pages of its own. A page is free when nothing refers to it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.int8_decode import Int8DecodeAttention, quantised
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import PAGE, PagedTensor, PageTable
from ktc.model.experts.layouts.packed import zeros_on_huge_pages
from ktc.model.kernels.kernel_library import Kernel

_FEWEST: Final = 8  # pages


class LayerRow(NamedTuple):
    """Keys and values (heads, length, width) of one sequence in one layer; a window keeps its last tokens only."""

    keys: Tensor
    values: Tensor


class Page:
    """A page of a pool, and its number now."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class PageMemory:
    """Keys or values of all pages: numbers (pages, heads, PAGE, width), or two such tensors of codes and of scales."""

    def __init__(self, like: Tensor, decode: DecodeAttention) -> None:
        """Make memory without pages for rows such as `like` (heads, any length, width), which `decode` reads."""
        self.tensors = [part.new_zeros((0, part.shape[0], PAGE, part.shape[2])) for part in _parts(like)]
        self._kernel: Kernel | None = None
        self._dtype = like.dtype
        if isinstance(like, Int8Tensor):
            assert isinstance(decode, Int8DecodeAttention), "codes have a kernel that reads them"
            self._kernel = decode.kernel

    def resize(self, pages: int) -> None:
        """Move the pages to memory for this many."""
        for at, old in enumerate(self.tensors):
            if pages != old.shape[0]:
                new = zeros_on_huge_pages((pages, *old.shape[1:]), old)
                kept = min(old.shape[0], pages)
                new[:kept] = old[:kept]
                self.tensors[at] = new

    def move(self, old: Tensor, new: Tensor) -> None:
        """Copy pages to the places of others."""
        for tensor in self.tensors:
            tensor[new] = tensor[old]

    def write(self, row: Tensor, pages: Sequence[int]) -> None:
        """Write (heads, length, width) into pages, from the first position of the first."""
        for tensor, part in zip(self.tensors, _parts(row), strict=True):
            for at, page in enumerate(pages):
                positions = part[:, at * PAGE : (at + 1) * PAGE]
                tensor[page, :, : positions.shape[1]] = positions

    def append(self, new: Tensor, places: Tensor) -> None:
        """Write a token of every row (rows, heads, 1, width): `places` are those of `RowTable.places`.

        Where there are codes, the kernel that reads them makes them.
        """
        parts = _parts(new if self._kernel is None else quantised(self._kernel, new))
        for tensor, part in zip(self.tensors, parts, strict=True):
            width = tensor.shape[3]
            tensor.view(-1, width).index_copy_(0, places, part.reshape(-1, width))

    def read(self, pages: Sequence[int], length: int) -> Tensor:
        """Return a copy (heads, length, width) of the first positions in pages."""
        return self._joined([tensor[list(pages)].transpose(0, 1).flatten(1, 2)[:, :length] for tensor in self.tensors])

    def rows(self, table: PageTable, columns: int) -> Tensor:
        """Return the rows of a table, (rows, heads, columns, width)."""
        return self._joined([PagedTensor(tensor, table, columns) for tensor in self.tensors])

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if self._kernel is None else Int8Tensor(parts[0], parts[1], self._dtype)


def _parts(row: Tensor) -> tuple[Tensor, ...]:
    return (row.codes, row.scales) if isinstance(row, Int8Tensor) else (row,)


class PagePool:
    """The pages of some layers: `layers` has the keys and values of each."""

    def __init__(self, like: Mapping[int, LayerRow], kernels: Mapping[int, DecodeAttention]) -> None:
        """Make a pool without pages, for rows such as `like` of layers by their numbers."""
        self.layers: Final = {
            number: (PageMemory(row.keys, kernels[number]), PageMemory(row.values, kernels[number]))
            for number, row in like.items()
        }
        self._capacity = 0
        self._free: list[int] = []
        self._pages: WeakValueDictionary[int, Page] = WeakValueDictionary()
        self._reserve(_FEWEST)
        self.page_bytes: Final = self.nbytes // _FEWEST
        """The bytes of a page in all layers."""

    @property
    def nbytes(self) -> int:
        """The bytes of all pages, used or not."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def used(self) -> int:
        """The number of pages that something refers to."""
        return len(self._pages)

    @property
    def unused_bytes(self) -> int:
        """The bytes of pages that nothing refers to."""
        return (self._capacity - self.used) * self.page_bytes

    @property
    def is_mostly_unused(self) -> bool:
        """Whether `compact` leaves a quarter or less: smaller steps would be undone by the next sequences."""
        return self._capacity >= 4 * _capacity_for(self.used)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of all layers."""
        return tuple(tensor for memory in self._memories for tensor in memory.tensors)

    @property
    def _memories(self) -> tuple[PageMemory, ...]:
        return tuple(memory for pair in self.layers.values() for memory in pair)

    def take(self, count: int) -> list[Page]:
        """Return pages that nothing refers to."""
        if len(self._free) < count:
            used = set(self._pages.keys())  # a page may lose its last reference at any time
            self._free = [number for number in reversed(range(self._capacity)) if number not in used]
        if len(self._free) < count:
            self._reserve(self._capacity - len(self._free) + count)
        taken = [Page(self._free.pop()) for _ in range(count)]
        self._pages.update((page.number, page) for page in taken)
        return taken

    def store(self, layers: Mapping[int, LayerRow], length: int, shared: Sequence[Page] = ()) -> tuple[Page, ...]:
        """Write a sequence; `shared` are full pages that hold its beginning. Return all of its pages."""
        begun = len(shared) * PAGE
        new = self.take(-(-(length - begun) // PAGE))
        numbers = [page.number for page in new]
        for index, row in layers.items():
            for memory, part in zip(self.layers[index], row, strict=True):
                memory.write(part[:, begun:], numbers)
        return *shared, *new

    def read(self, layer: int, pages: Sequence[Page], length: int) -> LayerRow:
        """Return a copy of the first positions in pages, of one layer."""
        numbers = [page.number for page in pages]
        keys, values = self.layers[layer]
        return LayerRow(keys.read(numbers, length), values.read(numbers, length))

    def compact(self) -> None:
        """Release the memory that the used pages do not need. Pages get other numbers."""
        pages = sorted(self._pages.values(), key=lambda page: page.number)
        holes = sorted(set(range(len(pages))) - {page.number for page in pages})
        moved = pages[len(pages) - len(holes) :]
        old, new = (torch.tensor(numbers, dtype=torch.long) for numbers in ([page.number for page in moved], holes))
        for memory in self._memories:
            memory.move(old, new)
        for page, number in zip(moved, holes, strict=True):
            page.number = number
        self._pages = WeakValueDictionary((page.number, page) for page in pages)
        self._free = []
        self._capacity = min(self._capacity, _capacity_for(len(pages)))
        for memory in self._memories:  # where that fails, there is more than the capacity, which does no harm
            memory.resize(self._capacity)

    def _reserve(self, pages: int) -> None:
        """Make room for this many pages."""
        capacity = _capacity_for(pages)
        for memory in self._memories:
            memory.resize(max(capacity, self._capacity))
        self._free += reversed(range(self._capacity, capacity))
        self._capacity = max(capacity, self._capacity)


def _capacity_for(pages: int) -> int:
    return max(_FEWEST, 1 << (pages - 1).bit_length())
