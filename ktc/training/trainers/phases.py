"""The time of a training step by phase: forward, backward, update and data, and the experts' kernels within them.

In: marks set during a run (`PhaseClock`). Out: `StepTimes` of each step, whose phases add up to its seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch.utils.hooks import RemovableHandle

from ktc.model.experts.module import FusedMoe
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


class ExpertsHooks:
    """The hooks around the forward of a module of experts, which give its times to `record`.

    A callback may copy or pickle the model in mid-run. The hooks of that copy record nothing.
    """

    def __init__(self, record: Callable[[float, float], None] | None = None) -> None:
        self._record, self._began = record, 0.0

    def before(self, *_: object) -> None:
        """Run before the forward."""
        self._began = time.perf_counter()

    def after(self, *_: object) -> None:
        """Run after the forward."""
        if self._record is not None:
            self._record(self._began, time.perf_counter())

    def __reduce__(self) -> tuple[type[ExpertsHooks], tuple[()]]:
        return ExpertsHooks, ()


class PhaseClock:
    """The marks of one step after the other. A kernel call may come from any thread."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._data = 0.0
        self._ahead: list[Window] = []
        self._began = 0.0
        self._backward: list[Window] = []
        self._calls: list[KernelCall] = []
        self._experts: list[Window] = []

    def running(self, experts: Iterable[FusedMoe]) -> AbstractContextManager[None]:
        """Record the kernels of these layers inside the context."""
        packed = (layer.weights.packed for layer in experts)
        return listening(self._record_call, {weights.address for weights in packed if weights is not None})

    @contextmanager
    def fetching(self) -> Generator[None]:
        """Enter this around the fetching of a step's batches, which precedes `begin`."""
        began = time.perf_counter()
        yield
        self._data += time.perf_counter() - began

    @contextmanager
    def fetching_ahead(self) -> Generator[None]:
        """Enter this around fetching within a step, between passes or behind them, of the next one's batches."""
        began = time.perf_counter()
        yield
        self._ahead.append((began, time.perf_counter()))

    def begin(self) -> None:
        """Begin a step. Kernel calls between the steps (an evaluation) are dropped."""
        self._backward, self._calls, self._experts, self._ahead = [], [], [], []
        self._began = time.perf_counter()

    @contextmanager
    def backward(self) -> Generator[None]:
        """Enter this around each backward pass."""
        began = time.perf_counter()
        yield
        self._backward.append((began, time.perf_counter()))

    def _record_call(self, call: KernelCall) -> None:
        self._calls.append(call)

    def experts(self, began: float, ended: float) -> None:
        """Record the times of a forward of a module of experts, its kernel included."""
        self._experts.append((began, ended))

    def around(self, experts: FusedMoe) -> Sequence[RemovableHandle]:
        """Record the times of the module's forward until the hooks are removed."""
        hooks = ExpertsHooks(self.experts)
        return experts.register_forward_pre_hook(hooks.before), experts.register_forward_hook(hooks.after)

    def end(self) -> StepTimes:
        """End the step. The next step's data may be fetched from now on."""
        ended = time.perf_counter()
        calls = tuple((self._phase(call), call) for call in self._calls)
        seconds_of = dict.fromkeys(PHASES, 0.0)
        for phase, call in calls:
            seconds_of[phase] += call.seconds
        in_backward = sum(end - begin for begin, end in self._backward)
        in_experts = sum(end - begin for begin, end in self._experts if not self._is_backward(begin))
        last = self._backward[-1][1] if self._backward else ended
        ahead = sum(end - begin for begin, end in self._ahead)
        before = sum(end - begin for begin, end in self._ahead if begin < last)
        seconds_of["data"] = self._data + ahead
        seconds_of["moe_waiting"] = max(0.0, in_experts - seconds_of["moe_forward"])
        experts = seconds_of["moe_forward"] + seconds_of["moe_waiting"]
        seconds_of["forward"] = last - self._began - in_backward - experts - before
        seconds_of["backward"] = in_backward - seconds_of["moe_recompute"] - seconds_of["moe_backward"]
        seconds_of["update"] = ended - last - (ahead - before)
        seconds = ended - self._began + self._data
        self._clear()
        return StepTimes(seconds, seconds_of, calls)

    def _phase(self, call: KernelCall) -> str:
        if call.kind == "backward":
            return "moe_backward"
        return "moe_recompute" if self._is_backward(call.began) else "moe_forward"

    def _is_backward(self, moment: float) -> bool:
        return any(begin <= moment < end for begin, end in self._backward)
