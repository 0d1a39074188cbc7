"""Scalars that a model's code makes on a GPU within a capture: a kernel fills them.

In: `torch.tensor(number, device=GPU)`, as the masks of transformers' eager attention have it. It copies the number from
pageable memory, and a CUDA graph holds no such copy. Out: the same tensor, by `torch.full`. Other calls are unchanged.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_FILLED: Final = frozenset({"dtype", "device"})  # the arguments of a call that is replaced


class FilledScalars(TorchFunctionMode):
    """A context in which `torch.tensor` fills the scalars that are for a device other than the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], bool | int | float):
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            if device.type != "cpu" and kwargs.keys() <= _FILLED:
                return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)
