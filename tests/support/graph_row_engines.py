"""Engines whose batches take captured steps, and the same answers alone.

Without a GPU, what a graph would replay is computed again at the same addresses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from decoding_models import stock_model
from engine_answers import alone
from recorded_steps import eager_graphs

from ktc.inference.serving.engine import Engine
from ktc.inference.serving.graph_rows import GraphRows
from ktc.inference.serving.row_memory import RowMemory
from ktc.model.decode_steps.cuda_graph import DecodeGraphs

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def graphs_here() -> DecodeGraphs:
    return DecodeGraphs() if DEVICE != "cpu" else eager_graphs()


def with_graphs(name: str) -> Any:
    model: Any = stock_model(name, torch.float32).to(DEVICE)
    if DEVICE != "cpu":
        model.set_experts_implementation("batched_mm")
    model.decode_graphs = graphs_here()
    return model


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots of each captured step that is replayed; 0 for a step that is refused."""
    found, begin = list[int](), GraphRows.begin

    def counted(graphs: GraphRows, memory: RowMemory, *given: Any) -> Any:
        begun = begin(graphs, memory, *given)
        found.append(0 if begun is None else memory.slots_of_step)
        return begun

    monkeypatch.setattr(GraphRows, "begin", counted)
    return found


def by_itself(model: Any, prompt: Sequence[int], config: Any, count: int) -> list[int]:
    with torch.device(DEVICE):
        return alone(model, prompt, config, count)


def settled(engine: Engine) -> None:
    """Wait until the engine has no steps to capture."""
    for _ in range(600):
        if not engine.lacks_steps:
            return
        time.sleep(0.05)
    raise AssertionError("steps are captured without end")


def failing(*_: Any) -> Any:
    raise ValueError("no luck")


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)
