"""Memory on huge pages: mappings for packed weights and saved activations, and tensors that PyTorch has allocated."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

HUGE_PAGE: Final = 2 << 20  # bytes
_COLLAPSE: Final = 25  # MADV_COLLAPSE of Linux 6.1: at once, and not when the kernel's thread gets there


def anonymous(size: int, what: str) -> mmap.mmap:
    """Map `size` zeroed bytes. Memory is taken when it is written, not here.

    Raises `MemoryError` with the number of bytes and their purpose, `what`.
    """
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {size:,} bytes for {what}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def take_huge_pages(address: int, size: int) -> None:
    """Let the whole huge pages within `size` bytes of private memory at `address`, not yet written, be such pages.

    Such memory is written three times as fast, and nothing is left to `collapse`.
    """
    _advise(address, size, getattr(mmap, "MADV_HUGEPAGE", None))


def collapse(address: int, size: int) -> None:
    """Move the whole huge pages within `size` bytes of private memory at `address` to such pages.

    The content stays. Memory is read faster then; where the system has no huge page, nothing changes.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(address, size, mmap.MADV_HUGEPAGE, _COLLAPSE)


def _advise(address: int, size: int, *advices: int | None) -> None:
    begin, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + size) // HUGE_PAGE * HUGE_PAGE
    if begin >= end:
        return
    madvise = ctypes.CDLL(None).madvise
    for advice in advices:
        if advice is not None:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(advice))
