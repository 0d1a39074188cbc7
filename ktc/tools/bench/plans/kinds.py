"""The time of each kind of module within a call, forward and backward, by hooks that wait for the GPU.

Waiting takes away what runs side by side, so the kinds are timed in calls of their own and not in those of the total.
The first of them is not counted: functions that `torch.compile` made are compiled again for modules with hooks.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture import CapturedModel

_CALLS: Final = 3


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


def seconds_of_kinds(kinds: Mapping[str, list[nn.Module]], call: Callable[[], object]) -> dict[str, float]:
    """Return the median seconds of each kind in repeated calls; experts are not in those around them."""
    with _timed(kinds) as spent:
        rounds = list[dict[str, float]]()
        for _ in range(1 + _CALLS):
            spent.clear()
            call()
            rounds.append(dict(spent))
    medians = {kind: statistics.median(seconds[kind] for seconds in rounds[1:]) for kind in rounds[-1]}
    medians["mlp"] = medians.get("mlp", 0.0) - medians.get("experts", 0.0)
    return medians


@contextmanager
def _timed(kinds: Mapping[str, list[nn.Module]]) -> Generator[dict[str, float]]:
    """Yield the seconds of each kind, which every call within the block adds to."""
    spent, begun = defaultdict[str, float](float), dict[tuple[int, str], float]()
    handles: list[Any] = []

    def begin(module: nn.Module, way: str) -> None:
        _wait()
        begun[id(module), way] = time.perf_counter()

    def end(module: nn.Module, way: str, kind: str) -> None:
        _wait()
        began = begun.pop((id(module), way), None)
        if began is not None:
            spent[kind] += time.perf_counter() - began

    for kind, modules in kinds.items():
        for module in modules:
            handles += [
                module.register_forward_pre_hook(lambda m, _: begin(m, "forward")),
                module.register_forward_hook(lambda m, _, __, kind=kind: end(m, "forward", kind)),
                module.register_full_backward_pre_hook(lambda m, _: begin(m, "backward")),
                module.register_full_backward_hook(lambda m, _, __, kind=kind: end(m, "backward", kind)),
            ]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
