"""Captured decoding steps without a GPU: what a CUDA graph would replay is computed again, at the same addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ktc.model.cuda_graph import Compute, DecodeGraphs, Means


def record_eagerly(
    compute: Compute, device: torch.device, changing: Sequence[torch.Tensor] = ()
) -> tuple[Any, Callable[[], None]]:  # fmt: skip
    def computed() -> Any:
        found = compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next call drops the host functions of this one
        return found

    output = computed()
    with torch.inference_mode(mode=False):  # a graph's replay writes in any mode
        output.logits = output.logits.clone()

    def replay() -> None:
        output.logits.copy_(computed().logits)

    return output, replay


def call_at_once(function: int, argument: int) -> None:
    """What the stream of a GPU does with a host function when it reaches it."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


def eager_graphs() -> DecodeGraphs:
    return DecodeGraphs(Means(record_eagerly, "cpu", call_at_once))
