"""The time of each kind of module within a call or a trainer's step, forward and backward.

A stacked step has spans (`part_clock`), anything else hooks. Both record events of the GPU's stream and wait for
nothing, so the kinds of a call add up to no more than the call. Kinds are timed in rounds of their own, of which the
first is not counted: functions of `torch.compile` are compiled again for modules with hooks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture import CapturedModel
from ktc.training.trainers.part_clock import Moment, PartClock, listening, moment, seconds_between, wait_for_gpus


def modules_of(captured: CapturedModel, model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules of a realised model by kind: attention, the experts, the blocks around these, the head."""
    kinds: dict[str, list[nn.Module]] = {"attention": [], "experts": [], "mlp": [], "lm_head": []}
    for site in captured.sites:
        graph = captured.block(site.block).graph
        nodes = [] if graph is None else nodes_of(graph)
        attention = any(ops.operator(node) in ("sdpa", "recurrence") for node in nodes)
        kinds["attention" if attention else "mlp"].append(model.get_submodule(site.fqn))
        for node in nodes:
            if ops.operator(node) == "experts" and (fqn := f"{site.fqn}.{node.meta['fqn']}".rstrip(".")) != site.fqn:
                kinds["experts"].append(model.get_submodule(fqn))
    if head := captured.ends[1]:
        kinds["lm_head"].append(model.get_submodule(head))
    return kinds


class KindClock:
    """Seconds of each kind of module in rounds, each of which is a call or a step, while its hooks are attached."""

    def __init__(self, kinds: Mapping[str, list[nn.Module]]) -> None:
        self._kinds = kinds
        modules = [module for of_kind in kinds.values() for module in of_kind]
        devices = [parameter.device for module in modules for parameter in module.parameters()]
        self._device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self._open, self._ended = list[_Span](), list[tuple[str, _Span]]()
        self._handles, self._rounds = list[Any](), list[dict[str, float]]()

    def attach(self) -> None:
        """Register the hooks."""
        for kind, modules in self._kinds.items():
            for module in modules:
                self._handles += [
                    module.register_forward_pre_hook(lambda m, _: self._begin(m, "forward")),
                    module.register_forward_hook(lambda m, _, __, kind=kind: self._end(m, "forward", kind)),
                    module.register_full_backward_pre_hook(lambda m, _: self._begin(m, "backward")),
                    module.register_full_backward_hook(lambda m, _, __, kind=kind: self._end(m, "backward", kind)),
                ]

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def end_round(self) -> Mapping[str, float]:
        """Keep the seconds since the last round, and return them. A module inside another counts once."""
        wait_for_gpus()
        spent = dict.fromkeys(self._kinds, 0.0)
        for kind, span in self._ended:
            spent[kind] += span.seconds - sum(inside.seconds for inside in span.inside)
        self._rounds.append(spent)
        self._ended.clear()
        self._open.clear()
        return self._rounds[-1]

    @property
    def medians(self) -> dict[str, float]:
        """The seconds of each kind, medians of all rounds but the first."""
        return _medians(self._rounds)

    def _begin(self, module: nn.Module, way: str) -> None:
        self._open.append(_Span((id(module), way), moment(self._device)))

    def _end(self, module: nn.Module, way: str, kind: str) -> None:
        key = id(module), way
        if not any(span.key == key for span in self._open):
            return
        while (span := self._open.pop()).key != key:  # backward of these has no end: no input has a gradient
            pass
        span.ended = moment(self._device)
        self._ended.append((kind, span))
        if self._open:
            self._open[-1].inside.append(span)


@dataclass(slots=True)
class _Span:
    """A module's computation: its moments, and the modules inside."""

    key: tuple[int, str]
    began: Moment
    ended: Moment = 0.0
    inside: list[_Span] = field(default_factory=list["_Span"])

    @property
    def seconds(self) -> float:
        return seconds_between(self.began, self.ended)


class TimedSteps(TrainerCallback):
    """Times the kinds in every step of a trainer after the `first` ones.

    A stacked step runs parts of layers, of which no module is called: it has spans. Hooks time another step.
    """

    def __init__(self, hooks: KindClock, first: int) -> None:
        self._hooks, self._first = hooks, first
        self._parts, self._listening = PartClock(), ExitStack()
        self._rounds, self._hooked = list[Mapping[str, float]](), False

    @property
    def medians(self) -> dict[str, float]:
        """The seconds of each kind, medians of all rounds but the first."""
        return _medians(self._rounds)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == self._first:
            self._listening.enter_context(listening(self._parts))

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **_: Any) -> None:
        self._device = next(one.device for one in model.parameters() if one.requires_grad)
        self._updating = moment(self._device)

    def on_optimizer_step(self, *args: Any, **_: Any) -> None:
        self._parts.add("optimizer", self._updating, moment(self._device))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        seconds = self._parts.end_step()
        if state.global_step <= self._first:
            return
        if self._hooked:
            self._rounds.append({**seconds, **self._hooks.end_round()})
        elif seconds.keys() > {"optimizer"}:
            self._rounds.append(seconds)
        else:
            self._hooked = True
            self._hooks.attach()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._listening.close()
        self._hooks.detach()


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    counted = rounds[1:]
    kinds = {kind: None for seconds in counted for kind in seconds}
    return {kind: statistics.median(seconds.get(kind, 0.0) for seconds in counted) for kind in kinds}
