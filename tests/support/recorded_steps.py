"""Captured decoding steps without a GPU: what a CUDA graph would replay is computed again, at the same addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.decode_steps.graph_replay import Compute, Replay, Wait


def record_eagerly(
    compute: Compute, device: torch.device, *_: object
) -> tuple[Any, Replay]:  # fmt: skip
    def computed() -> Any:
        found = compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next call drops the host functions of this one
        return found

    output = computed()
    with torch.inference_mode(mode=False):  # a graph's replay writes in any mode
        output.logits = output.logits.clone()

    def replay() -> Wait:
        output.logits.copy_(computed().logits)
        return lambda: None

    return output, replay


def call_at_once(function: int, argument: int) -> None:
    """What the stream of a GPU does with a host function when it reaches it."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


class LastMoment:
    """A stream beside the model's that does its work when the model waits for it: results are there no earlier."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self.joined = 0

    @property
    def waiting(self) -> int:
        """Number of works that were started and not joined."""
        return len(self._work)

    def start(self, device: torch.device, work: Callable[[], object]) -> None:
        self._work.append(work)

    def join(self, device: torch.device) -> None:
        self.joined += 1
        self._work.pop()()
        assert not self._work


def eager_graphs(order: Callable[[], Any] = LastMoment) -> DecodeGraphs:
    return DecodeGraphs(StepRecorder(record_eagerly, "cpu", call_at_once, order))
