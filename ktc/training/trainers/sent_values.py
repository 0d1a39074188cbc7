"""Values of a GPU that are sent to the host when they are computed, and read when they are needed.

In: a tensor. Out: its values on the host. `Tensor.tolist` waits for all work that was given to the GPU before it, which
may be the backward of a whole step; a copy that was begun earlier has arrived by then.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class SentValues:
    """The values of a tensor on their way to the host. Those of a tensor in host memory are there at once."""

    def __init__(self, values: Tensor) -> None:
        values = values.detach()
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> Any:
        """Return them as `Tensor.tolist` does, when they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast("Any", self._values).tolist()
