"""Values of a device that are sent to the host when they are computed, and read when they are needed.

In: a tensor. Out: its values on the host. `Tensor.tolist` waits for all work that was given to the GPU before it, which
may be the backward of a whole step; a copy that was begun earlier has arrived by then.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class SentValues:
    """The values that a tensor has where it is in the device's work, on their way to the host. It may change behind."""

    def __init__(self, values: Tensor) -> None:
        pinned = values.is_cuda
        self._there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned)
        self._there.copy_(values.detach(), non_blocking=pinned)
        self._arrived: Any = None
        if pinned:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))  # another GPU may be the current one

    def read(self) -> Any:
        """Return them as `Tensor.tolist` does, when they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast("Any", self._there).tolist()
