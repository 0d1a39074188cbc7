"""Where a step of a model in this process goes: CPU time by part, each without the parts inside it.

In: an engine and a case. Out: seconds of a step by part. Hooks on all modules read the clock, so the sum is a little
more than an unobserved step. Native steps call no module, so the observed steps run without them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.modules import module as hooks

from ktc.model.experts.module import FusedMoe
from ktc.tools.bench.decode.engines import LocalEngine
from ktc.tools.bench.requests import Case

PARTS: Final[tuple[str, ...]] = ("experts", "linears", "lm_head", "norms", "attention", "router", "rest")
_STEPS: Final = 8


def parts_of(engine: LocalEngine, case: Case) -> dict[str, float]:
    """Return the median seconds of each part over some steps of a decode case; the first one is not counted."""
    cache = engine.filled_cache(case)
    ids = torch.arange(case.batch)[:, None]
    steps: list[dict[str, float]] = []
    with _eager(engine.model):
        for _ in range(1 + _STEPS):
            with _clocked(engine.model) as spent:
                engine.step(ids, cache)
            steps.append(spent)
    return {part: median(step[part] for step in steps[1:]) for part in PARTS}


@contextmanager
def _eager(model: Any) -> Generator[None]:
    graphs = getattr(model, "decode_graphs", None)
    model.decode_graphs = None
    try:
        yield
    finally:
        model.decode_graphs = graphs


@contextmanager
def _clocked(model: nn.Module) -> Generator[dict[str, float]]:
    """Yield what fills with the seconds of each part."""
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    names = {id(module): _part(name, module, model) for name, module in modules}
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    began: list[float] = []
    inside: list[float] = []

    def before(module: nn.Module, inputs: Any) -> None:
        inside.append(0.0)
        began.append(time.process_time())

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        whole = time.process_time() - began.pop()
        spent[names.get(id(module), "rest")] += whole - inside.pop()
        if inside:
            inside[-1] += whole

    handles = (hooks.register_module_forward_pre_hook(before), hooks.register_module_forward_hook(after))
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def _part(name: str, module: nn.Module, model: Any) -> str:
    kind = type(module).__name__
    if module is model.get_output_embeddings():
        return "lm_head"
    if isinstance(module, FusedMoe) or kind.endswith("Experts"):
        return "experts"
    if "Router" in kind or name.endswith(".gate"):
        return "router"
    if isinstance(module, nn.Linear):
        return "linears"
    if "Norm" in kind:
        return "norms"
    return "attention" if "Attention" in kind or "Rotary" in kind else "rest"
