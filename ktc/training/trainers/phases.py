"""The time of a training step by phase: forward, backward, update and data, and the experts' kernels within them.

In: marks set during a run (`PhaseClock`). Out: `StepTimes` of each step, whose phases add up to its seconds.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from ktc.model.kernels.kernel_clock import KernelCall, listening

Window = tuple[float, float]

PHASES = {
    "data": "fetching and collating the batches",
    "forward": "attention, router, loss and everything else forward",
    "moe_forward": "experts' kernels forward",
    "moe_waiting": "waiting for the hidden states of the experts forward, and copying them",
    "backward": "everything else backward, and recomputation there",
    "moe_recompute": "experts' kernels forward again, within backward",
    "moe_backward": "experts' kernels backward",
    "update": "reducing and clipping gradients, and the optimizer",
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step: its seconds, those of each phase, and the kernel calls within, by the same phases."""

    seconds: float
    phases: Mapping[str, float]
    calls: tuple[tuple[str, KernelCall], ...]


_running: Final[list[PhaseClock]] = []


@contextmanager
def backward_pass() -> Generator[None]:
    """Enter this around a backward pass that a trainer's accelerator does not run, so that clocks count it."""
    with ExitStack() as stack:
        for clock in _running:
            stack.enter_context(clock.backward())
        yield


class PhaseClock:
    """The marks of one step after the other. A kernel call may come from any thread."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._data = 0.0
        self._began = 0.0
        self._backward: list[Window] = []
        self._calls: list[KernelCall] = []
        self._experts: list[Window] = []

    @contextmanager
    def running(self) -> Generator[None]:
        """Record kernels and backward passes inside the context."""
        _running.append(self)
        try:
            with listening(self._hear):
                yield
        finally:
            _running.remove(self)

    @contextmanager
    def fetching(self) -> Generator[None]:
        """Enter this around the fetching of a step's batches, which precedes `begin`."""
        began = time.perf_counter()
        yield
        self._data += time.perf_counter() - began

    def begin(self) -> None:
        """Begin a step. Kernel calls between the steps (an evaluation) are dropped."""
        self._backward, self._calls, self._experts = [], [], []
        self._began = time.perf_counter()

    @contextmanager
    def backward(self) -> Generator[None]:
        """Enter this around each backward pass."""
        began = time.perf_counter()
        yield
        self._backward.append((began, time.perf_counter()))

    def _hear(self, call: KernelCall) -> None:
        self._calls.append(call)

    def experts(self, began: float, ended: float) -> None:
        """Record the forward of a module of experts, its kernel included."""
        self._experts.append((began, ended))

    def end(self) -> StepTimes:
        """End the step. The next step's data may be fetched from now on."""
        ended = time.perf_counter()
        calls = tuple((self._phase(call), call) for call in self._calls)
        found = dict.fromkeys(PHASES, 0.0)
        for phase, call in calls:
            found[phase] += call.seconds
        in_backward = sum(end - begin for begin, end in self._backward)
        in_experts = sum(end - begin for begin, end in self._experts if not self._is_backward(begin))
        last = self._backward[-1][1] if self._backward else ended
        found["data"] = self._data
        found["moe_waiting"] = max(0.0, in_experts - found["moe_forward"])
        found["forward"] = last - self._began - in_backward - found["moe_forward"] - found["moe_waiting"]
        found["backward"] = in_backward - found["moe_recompute"] - found["moe_backward"]
        found["update"] = ended - last
        seconds = ended - self._began + self._data
        self._clear()
        return StepTimes(seconds, found, calls)

    def _phase(self, call: KernelCall) -> str:
        if call.kind == "backward":
            return "moe_backward"
        return "moe_recompute" if self._is_backward(call.began) else "moe_forward"

    def _is_backward(self, moment: float) -> bool:
        return any(begin <= moment < end for begin, end in self._backward)
