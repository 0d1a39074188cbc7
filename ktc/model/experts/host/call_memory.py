"""Memory that the host and a GPU share for calls of experts: pinned, and written and read by kernels of the GPU.

In: the inputs of a call on the GPU. Out: the same in pinned memory, after one kernel, where a copy of each would be
three; and the result on the GPU, after one more. A kernel begins sooner after another kernel than a copy does.
If the memory was pinned for another GPU, copies are used instead, with one warning in the log (L455).
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, render

log = logging.getLogger(__name__)

_WORD: Final = torch.int16  # the dtype in which the kernel copies all inputs, whose items are whole words
_INTERFACE: Final = 3  # version of `__cuda_array_interface__`


class CallMemory:
    """Inputs and result of calls with the shapes and dtypes of `x`, `index` and `weights`, which are on one device.

    `x`, `index`, `weights` and `out`, shaped like `x`, are on the host.
    """

    def __init__(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        given = {"x": x, "index": index, "weights": weights}
        self._order = sorted(given, key=lambda name: -given[name].itemsize)  # each begins at a multiple of its dtype
        sizes = [given[name].nbytes for name in self._order]
        with torch.inference_mode(mode=False):
            memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=x.is_cuda)
            self.out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        pieces = cast("tuple[Tensor, ...]", cast("Any", memory).split(sizes))
        parts = dict(zip(self._order, pieces, strict=True))
        self.x, self.index, self.weights = (
            parts[name].view(like.dtype).view(like.shape) for name, like in given.items()
        )
        self._is_on_host = x.device.type == "cpu"
        self._seen_inputs, self._seen_out = seen_by(memory.view(_WORD), x.device), seen_by(self.out, x.device)
        self._inputs = memory.view(_WORD)

    @property
    def is_shared(self) -> bool:
        """Whether kernels of the device read and write this memory."""
        return self._is_on_host or (self._seen_inputs is not None and self._seen_out is not None)

    @property
    def seen_inputs(self) -> Tensor:
        """The memory of all inputs as kernels of the device see it, in words of int16."""
        return self._inputs if self._seen_inputs is None else self._seen_inputs

    @property
    def seen_out(self) -> Tensor:
        """The result as kernels of the device see it."""
        return self.out if self._seen_out is None else self._seen_out

    def words(self, x: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
        """Return the inputs of a call as words of int16, in the order of `seen_inputs`."""
        given = {"x": x, "index": index, "weights": weights}
        return [given[name].contiguous().view(-1).view(_WORD) for name in self._order]

    def put(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        """Enqueue the transfer of a call's inputs to the host."""
        given = {"x": x, "index": index, "weights": weights}
        if self._seen_inputs is None:
            for name, value in given.items():
                getattr(self, name).copy_(value, non_blocking=True)
        else:
            torch.cat(self.words(x, index, weights), out=self._seen_inputs)

    def get(self, out: Tensor) -> None:
        """Enqueue the transfer of the result to `out`, on the device."""
        if self._seen_out is None:
            out.copy_(self.out, non_blocking=True)
        else:
            torch.mul(self._seen_out, 1, out=out)  # `copy_` would be a copy of the driver's


class _Array:
    """Memory as PyTorch takes an array of a GPU from another library."""

    def __init__(self, memory: Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": _INTERFACE,
        }  # fmt: skip
        self.kept = memory


def seen_by(memory: Tensor, device: torch.device) -> Tensor | None:
    """Return pinned memory as a tensor of a GPU. None on the host, and with a warning where it is another GPU's."""
    if device.type != "cuda":
        return None
    seen = view_of(memory, device)
    if seen is None:
        _tell_of_copies(device)
    return seen


def view_of(memory: Tensor, device: torch.device) -> Tensor | None:
    """Return locked memory as a tensor of a GPU, which keeps `memory` alive. None where it is another GPU's.

    One element asks first: PyTorch copies all memory that is another GPU's.
    """
    with torch.inference_mode(mode=False):
        for part in (memory.flatten()[:1], memory):
            seen = torch.as_tensor(_Array(part), device=device)
            if seen.data_ptr() != part.data_ptr():
                return None
    return seen.view(memory.dtype).view(memory.shape)


@functools.cache
def _tell_of_copies(device: torch.device) -> None:
    """Warn (L455) that calls of experts take copies to and from `device`. Once per process and device."""
    message = f"inputs and results of experts are copied to and from `{device}`: another GPU pinned their memory"
    hint = "let the process see one GPU (`CUDA_VISIBLE_DEVICES`); see `ktc explain L455`"
    log.warning("%s", render([Diagnostic("L455", message, hint=hint, severity="warning")]))
