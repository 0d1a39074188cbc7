"""Tokens between two steps that a device takes one behind the other, without a wait of the host.

In: tokens that a device has chosen, or is about to. Out: they are the inputs of the next step there, and copies of them
are on their way to the host; small values go the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


def feed(inputs: Mapping[str, Tensor], tokens: Tensor) -> None:
    """Let a recorded step read tokens (B,), one position behind its last ones; further rows repeat the first."""
    ids, batch = inputs["input_ids"][:, 0], len(tokens)
    ids[:batch].copy_(tokens)
    if batch < len(ids):
        ids[batch:].copy_(tokens[:1].expand(len(ids) - batch))
    inputs["position_ids"].add_(1)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Values on their way to the host, through page-locked memory: `there` has them when `copied` is over."""

    there: Tensor
    copied: Any

    @classmethod
    def begin(cls, values: Tensor) -> HostCopy:
        """Enqueue a copy behind what computes the values, which may change behind it."""
        there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
        there.copy_(values, non_blocking=True)
        if not values.is_cuda:
            return cls(there, None)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(values.device))  # another one may be the process' current GPU
        return cls(there, copied)

    def read(self) -> list[Any]:
        """Wait for the values, and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        return cast("list[Any]", self.there.tolist())


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device. Unlike `to` alone, it does not wait for what the device computes."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
