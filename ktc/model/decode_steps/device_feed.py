"""Tokens between two steps that a device takes one behind the other, without a wait of the host.

In: tokens that a device has chosen, or is about to. Out: they are the inputs of the next step there. Small values of
the host go to it too; those of the device come back as `SentValues`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def feed(inputs: Mapping[str, Tensor], tokens: Tensor) -> None:
    """Let a recorded step read tokens (B,), one position behind its last ones; further rows repeat the first."""
    ids, batch = inputs["input_ids"][:, 0], len(tokens)
    ids[:batch].copy_(tokens)
    if batch < len(ids):
        ids[batch:].copy_(tokens[:1].expand(len(ids) - batch))
    inputs["position_ids"].add_(1)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device. Unlike `to` alone, it does not wait for what the device computes."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
