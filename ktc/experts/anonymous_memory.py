"""Anonymous mappings on huge pages, for packed weights and saved activations: outside PyTorch's allocator."""

from __future__ import annotations

import mmap
from typing import Final

HUGE_PAGE: Final = 2 << 20  # bytes


def anonymous(size: int, what: str) -> mmap.mmap:
    """Map `size` zeroed bytes. Memory is taken when it is written, not here.

    Raises `MemoryError` with the number of bytes and `what` they are for.
    """
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {size:,} bytes for {what}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
