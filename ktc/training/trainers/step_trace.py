"""The timeline of one training step: a Chrome trace, and the busy times of host, GPUs and bus in it.

In: a trainer's callbacks. Out: a JSON file that chrome://tracing and ui.perfetto.dev open, and a `Timeline` to draw.
The traced step is the third, or the last of fewer: the first two compile and learn which weights are sent ahead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ktc.foundation.files import temporary_folder, write_file

log = logging.getLogger(__name__)

TRACED_STEP: Final = 3
_LANES: Final = ("host", "GPU", "to the GPU", "from the GPU")
_CLOSE: Final = 2000  # parts of the step: intervals nearer than one of them are drawn as one


@dataclass(frozen=True, slots=True)
class Timeline:
    """The busy intervals (begin, end) of each lane that has any, in seconds from the begin of the step."""

    seconds: float
    lanes: Mapping[str, tuple[tuple[float, float], ...]]

    def share(self, lane: str) -> float:
        """Return the share of the step in which a lane is busy."""
        return sum(end - begin for begin, end in self.lanes.get(lane, ())) / self.seconds


class StepTrace(TrainerCallback):
    """Traces one step and writes it to `path` at the end of the step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: Any = None
        self._traced = 0  # the number of the step
        self.timeline: Timeline | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._traced = min(state.global_step + TRACED_STEP, state.max_steps)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._profile is not None:
            self._profile.stop()
        if self.timeline is None:
            log.warning("no step was traced: the run ended before step %d", self._traced)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.timeline is None and state.global_step + 1 == self._traced:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities)
            self._profile.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._profile is None:
            return
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        self._profile.stop()
        with temporary_folder("trace") as folder:
            raw = folder / "trace.json"
            self._profile.export_chrome_trace(str(raw))
            text = raw.read_text()
        self._profile = None
        self.timeline = timeline(json.loads(text)["traceEvents"])
        if state.is_world_process_zero:
            write_file(self._path, text)


def timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Return the busy intervals of a Chrome trace (times in microseconds)."""
    spans_of: dict[str, list[tuple[float, float]]] = {lane: [] for lane in _LANES}
    for event in events:
        if event.get("ph") == "X" and (lane := _lane(event)):
            spans_of[lane].append((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))))
    begin = min((start for spans in spans_of.values() for start, _ in spans), default=0.0)
    end = max((stop for spans in spans_of.values() for _, stop in spans), default=1.0)
    gap = (end - begin) / _CLOSE
    lanes = {
        lane: tuple(((a - begin) / 1e6, (b - begin) / 1e6) for a, b in _joined(spans, gap))
        for lane, spans in spans_of.items()
        if spans
    }
    return Timeline((end - begin) / 1e6, lanes)


def _lane(event: Mapping[str, Any]) -> str:
    category, name = str(event.get("cat")), str(event.get("name"))
    if category == "cpu_op":
        return "host"
    if category == "gpu_memcpy" and "HtoD" in name:
        return "to the GPU"
    if category == "gpu_memcpy" and "DtoH" in name:
        return "from the GPU"
    return "GPU" if category in ("kernel", "gpu_memcpy", "gpu_memset") else ""


def _joined(spans: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined
