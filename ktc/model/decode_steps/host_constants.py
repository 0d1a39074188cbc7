"""Constants that a model's code computes on the CPU and copies to a GPU in each step, kept on the GPU for a capture.

In: a step before a capture, in which small tensors or lists of the CPU are copied to a GPU, as the frequencies of
PhiMoE's positions are (transformers 5.17). A CUDA graph holds no copy from pageable memory. Out: in the capture the
same calls return what that step made, copied on the GPU. Refused: a tensor that the capture computes otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MOST: Final = 1 << 20  # bytes of a tensor that is kept


class HostConstant(NamedTuple):
    """A tensor or numbers of the CPU, and the copy on the device."""

    source: object
    copy: Tensor


class NotedConstants(TorchFunctionMode):
    """A context that adds to `noted` what this thread copies from the CPU to another device, in the code's order."""

    def __init__(self, noted: list[HostConstant]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copied = _copied(func, args, kwargs)
        result = func(*args, **kwargs)
        if copied is not None:
            source = copied.clone() if isinstance(copied, Tensor) else copied
            self._noted.append(HostConstant(source, result.detach().clone()))
        return result


class GivenConstants(TorchFunctionMode):
    """A context in which copies from the CPU are those of `noted`, in their order; they have to live on.

    A call raises RuntimeError where it would copy something else.
    """

    def __init__(self, noted: Sequence[HostConstant]) -> None:
        super().__init__()
        self._left = iter(noted)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copied = _copied(func, args, kwargs)
        if copied is None:
            return func(*args, **kwargs)
        constant = next(self._left, None)
        if constant is None or not _are_equal(constant.source, copied):
            raise RuntimeError("a tensor that a step copies from the CPU is not the same in all steps")
        return args[0].copy_(constant.copy) if func is Tensor.copy_ else constant.copy.clone()


def _copied(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | list[Any] | tuple[Any, ...] | None:
    """Return the small tensor of the CPU, or the numbers, that a call copies to another device; None for other calls.

    They are read without this mode, which is off inside `__torch_function__`.
    """
    if func is Tensor.to or func is Tensor.cuda:
        source, device = args[0], "cuda" if func is Tensor.cuda else _device_of_to(args, kwargs)
    elif func is Tensor.copy_ and len(args) > 1:
        source, device = args[1], args[0].device
    elif func is torch.tensor or func is torch.as_tensor:
        source, device = args[0] if args else None, kwargs.get("device") or torch.get_default_device()
    else:
        return None
    if device is None or torch.device(device).type == "cpu" or kwargs.get("requires_grad"):
        return None
    if isinstance(source, Tensor):  # a graph copies from pinned memory, whose values may change
        is_kept = source.device.type == "cpu" and source.nbytes <= _MOST and not source.is_pinned()
        return source if is_kept else None
    return cast("list[Any] | tuple[Any, ...]", source) if isinstance(source, list | tuple) else None


def _device_of_to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the device that `Tensor.to` is given, or that of the tensor that it is given."""
    for value in (*args[1:2], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, str | int | torch.device) and not isinstance(value, bool):
            return value
    return None


def _are_equal(noted: object, copied: Tensor | list[Any] | tuple[Any, ...]) -> bool:
    if isinstance(noted, Tensor) and isinstance(copied, Tensor):
        return noted.dtype == copied.dtype and torch.equal(noted, copied)
    return not isinstance(noted, Tensor) and noted == copied
