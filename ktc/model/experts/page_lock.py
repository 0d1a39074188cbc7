"""Page-locked host memory: a GPU's bus reads it at full speed, while host and GPU work.

In: a storage in host memory and the object that owns it. The lock ends with the owner: another model may get the same
address, and the bus would read old pages.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any, Final, cast

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED: Final = 3  # of cudaHostRegister: for all contexts of the process, and read by kernels
_tried: Final[dict[tuple[int, int], bool]] = {}  # by address and size of every storage given to `page_lock`


def page_lock(storage: Tensor, owner: object) -> bool:
    """Lock the pages of `storage` once, until `owner` is gone. Log a warning where that fails.

    Return whether they are locked; a GPU then reads them at their address too.
    """
    region = storage.data_ptr(), storage.nbytes
    if region in _tried:
        return _tried[region]
    status = int(cast("Any", torch.cuda.cudart()).cudaHostRegister(*region, _PORTABLE_AND_MAPPED))
    if status != 0:
        log.warning("weights could not be page-locked (CUDA error %d): sending them to the GPU is slow", status)
        _forget_error()
    _tried[region] = status == 0
    weakref.finalize(owner, _unlock, region, locked=status == 0).atexit = False  # CUDA ends before
    return status == 0


def _forget_error() -> None:
    """Let CUDA forget the last error of this thread, which the next launch of a kernel would report as its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unlock(region: tuple[int, int], *, locked: bool) -> None:
    _tried.pop(region, None)
    if not locked:
        return
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)  # it may still copy
    cast("Any", torch.cuda.cudart()).cudaHostUnregister(region[0])
