"""`PagePool`: keys and values of many sequences in pages of 128 positions, in memory that all of them share.

In: rows (heads, length, width) of numbers or of int8 codes, of several layers. Out: `Page`s, and the memory that
kernels read. A page has the same number in every layer. Sequences may share pages that are full, and each writes new
positions into pages of its own. A page is free when nothing refers to it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.int8_decode import Int8DecodeAttention, quantised
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import PAGE, PagedTensor, PageTable
from ktc.model.experts.packed import zeros_on_huge_pages
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
    """Numbers of all pages, (pages, heads, PAGE, width)."""

    def __init__(self, like: Tensor) -> None:
        """Make memory without pages for rows such as `like` (heads, any length, width)."""
        self.memory = like.new_zeros((0, like.shape[0], PAGE, like.shape[2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of all pages."""
        return (self.memory,)

    def resize(self, pages: int) -> None:
        """Move the pages to memory for this many."""
        held, heads, _, width = self.memory.shape
        if pages != held:
            memory = zeros_on_huge_pages((pages, heads, PAGE, width), self.memory)
            kept = min(held, pages)
            memory[:kept] = self.memory[:kept]
            self.memory = memory

    def move(self, old: Tensor, new: Tensor) -> None:
        """Copy pages to the places of others."""
        self.memory[new] = self.memory[old]

    def write(self, row: Tensor, pages: Sequence[int]) -> None:
        """Write (heads, length, width) into pages, from the first position of the first."""
        for at, page in enumerate(pages):
            part = row[:, at * PAGE : (at + 1) * PAGE]
            self.memory[page, :, : part.shape[1]] = part

    def append(self, new: Tensor, places: Tensor) -> None:
        """Write a token of every row (rows, heads, 1, width): `places` are those of `RowTable.places`."""
        width = self.memory.shape[3]
        self.memory.view(-1, width).index_copy_(0, places, new.reshape(-1, width))

    def read(self, pages: Sequence[int], length: int) -> Tensor:
        """Return a copy (heads, length, width) of the first positions in pages."""
        return self.memory[list(pages)].transpose(0, 1).flatten(1, 2)[:, :length]

    def tensor(self, table: PageTable, columns: int) -> PagedTensor:
        """Return the rows of a table, (rows, heads, columns, width)."""
        return PagedTensor(self.memory, table, columns)


class CodeMemory:
    """int8 codes of all pages, and their scales; new tokens become codes by the kernel that reads them."""

    def __init__(self, like: Int8Tensor, kernel: Kernel) -> None:
        """Make memory without pages for rows such as `like` (heads, any length, width)."""
        self._codes, self._scales, self._dtype = PageMemory(like.codes), PageMemory(like.scales), like.dtype
        self._kernel = kernel

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of all pages."""
        return *self._codes.tensors, *self._scales.tensors

    def resize(self, pages: int) -> None:
        """Move the pages to memory for this many."""
        self._codes.resize(pages)
        self._scales.resize(pages)

    def move(self, old: Tensor, new: Tensor) -> None:
        """Copy pages to the places of others."""
        self._codes.move(old, new)
        self._scales.move(old, new)

    def write(self, row: Tensor, pages: Sequence[int]) -> None:
        """Write codes (heads, length, width) into pages, from the first position of the first."""
        held = cast("Int8Tensor", row)
        self._codes.write(held.codes, pages)
        self._scales.write(held.scales, pages)

    def append(self, new: Tensor, places: Tensor) -> None:
        """Write the codes of a token of every row (rows, heads, 1, width)."""
        added = quantised(self._kernel, new)
        self._codes.append(added.codes, places)
        self._scales.append(added.scales, places)

    def read(self, pages: Sequence[int], length: int) -> Int8Tensor:
        """Return a copy (heads, length, width) of the first positions in pages."""
        return Int8Tensor(self._codes.read(pages, length), self._scales.read(pages, length), self._dtype)

    def tensor(self, table: PageTable, columns: int) -> Int8Tensor:
        """Return the rows of a table, (rows, heads, columns, width)."""
        codes, scales = self._codes.tensor(table, columns), self._scales.tensor(table, columns)
        return Int8Tensor(codes, scales, self._dtype)


Memory = PageMemory | CodeMemory


class PagePool:
    """The pages of some layers: `layers` has the keys and values of each."""

    def __init__(self, like: Mapping[int, LayerRow], kernels: Mapping[int, DecodeAttention]) -> None:
        """Make a pool without pages, for rows such as `like` of layers by their numbers."""
        self.layers: Final = {
            number: (_memory_for(row.keys, kernels[number]), _memory_for(row.values, kernels[number]))
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
    def _memories(self) -> tuple[Memory, ...]:
        return tuple(memory for pair in self.layers.values() for memory in pair)

    def take(self, count: int) -> list[Page]:
        """Return pages that nothing refers to."""
        if len(self._free) < count:
            held = set(self._pages.keys())  # a page may lose its last reference at any time
            self._free = [number for number in reversed(range(self._capacity)) if number not in held]
        if len(self._free) < count:
            self._reserve(self._capacity - len(self._free) + count)
        taken = [Page(self._free.pop()) for _ in range(count)]
        self._pages.update((page.number, page) for page in taken)
        return taken

    def store(self, layers: Mapping[int, LayerRow], length: int, shared: Sequence[Page] = ()) -> tuple[Page, ...]:
        """Write a sequence; `shared` are full pages that hold its beginning. Return all of its pages."""
        begun = len(shared) * PAGE
        own = self.take(-(-(length - begun) // PAGE))
        numbers = [page.number for page in own]
        for index, row in layers.items():
            for memory, part in zip(self.layers[index], row, strict=True):
                memory.write(part[:, begun:], numbers)
        return *shared, *own

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
        old, new = (torch.tensor(each, dtype=torch.long) for each in ([page.number for page in moved], holes))
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


def _memory_for(like: Tensor, decode: DecodeAttention) -> Memory:
    if isinstance(like, Int8Tensor):
        assert isinstance(decode, Int8DecodeAttention), "codes have a kernel that reads them"
        return CodeMemory(like, decode.kernel)
    return PageMemory(like)
