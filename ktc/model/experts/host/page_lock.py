"""Page-locked host memory: a GPU's bus reads it at full speed, while host and GPU work.

In: a storage in host memory and the object that owns it. The lock ends with the owner: another model may get the same
address, and the bus would read old pages.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import weakref
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, render

log = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED: Final = 3  # of cudaHostRegister: for all contexts of the process, and read by kernels
_tried: Final[dict[tuple[int, int], bool]] = {}  # by address and size of every storage given to `page_lock`
_refused: Final[list[int]] = []  # bytes of the first one


def page_lock(storage: Tensor, owner: object, *, warns: bool = True) -> bool:
    """Lock the pages of `storage` once, until `owner` is gone. Warn (L459) where that fails, once in the process.

    Return whether they are locked; a GPU then reads them at their address too. Without `warns` the caller reports it.
    """
    region = storage.data_ptr(), storage.nbytes
    if region in _tried:
        return _tried[region]
    status = int(cast("Any", torch.cuda.cudart()).cudaHostRegister(*region, _PORTABLE_AND_MAPPED))
    if status != 0:
        if warns:
            _tell(storage.nbytes, status)
        _forget_error()
    _tried[region] = status == 0
    weakref.finalize(owner, _unlock, region, locked=status == 0).atexit = False  # CUDA ends before
    return status == 0


def _tell(nbytes: int, status: int) -> None:
    """Warn (L459) of the first refusal."""
    if _refused:
        return
    _refused.append(nbytes)
    message = f"the system locks no pages of {nbytes / 2**20:,.0f} MiB of weights (CUDA error {status}): "
    message += "copies of them to the GPU are slow, and decoding steps read no experts over the bus"
    log.warning("%s", render([Diagnostic("L459", message, hint=more_to_lock(), severity="warning")]))


def more_to_lock() -> str:
    """Return the hint of a refusal."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    now = "" if limit == resource.RLIM_INFINITY else f", now {limit >> 10:,} KiB"
    return f"raise the limit of locked memory (`ulimit -l`{now}), and that of the container"


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
