"""`NativeRows`: steps of a few sequences of a running batch as native programs, on the batch's own pages.

In: the rows of a batch. Out: the logits of every row's next token, or None for a step that the model computes itself.
A program is recorded per number of rows and memory (`ktc.model.decode_steps.native_step`), when that number has taken
some steps: a recording takes the time of about ten. Rows that join and leave change its inputs only: ids, positions,
and the batch's table, which says where the pages of a row are and how long it is. The mask is constant and hides
nothing, since a kernel reads the positions of a row alone. Refused with a warning (L453): a model that cannot be
recorded, and layers that are not in pages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ktc.inference.serving.row_cache import RowCache
from ktc.inference.serving.row_layers import PagedStepLayer
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, reason_of, record_step
from ktc.model.decode_steps.graph_replay import Replay
from ktc.model.decode_steps.model_state import foreign_hook

MOST_ROWS: Final = 8  # with more, products take the time of a step, and not the calls between them
RECORDED_AFTER: Final = 8  # steps of one number of rows


@dataclass(frozen=True, slots=True)
class _Places:
    """The memory of a batch as a step sees it: `position` (1,) int64 is the last column, which the step writes.

    It is the same in all steps, and not among the `tensors` that change.
    """

    position: Tensor
    cache: Cache
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, rows: RowCache) -> _Places:
        assert rows.pool is not None
        columns = rows.table.columns
        position = torch.tensor([columns - 1])
        layers = [PagedStepLayer(memories, rows.table, position, columns) for memories in rows.pool.layers.values()]
        return cls(position, Cache(layers=cast("Any", layers)), rows.memory)


@dataclass(frozen=True, slots=True)
class _Step:
    places: _Places
    inputs: dict[str, Tensor]
    output: Any
    replay: Replay


class NativeRows:
    """The programs of one batch, for the state in which the model serves its adapter."""

    def __init__(self, model: PreTrainedModel, graphs: DecodeGraphs) -> None:
        self._model, self._graphs = model, graphs
        self._memory: tuple[Tensor, ...] = ()  # that the programs have the addresses of
        self._steps: dict[int, _Step] = {}
        self._taken = Counter[int]()
        self._is_refused = False

    @classmethod
    def of(cls, model: Any) -> NativeRows | None:
        """Return those of a model that takes native steps on the CPU, None for others."""
        graphs = getattr(model, "decode_graphs", None)
        return cls(model, graphs) if graphs is not None and not graphs.recorder.rounded else None

    def logits(self, rows: RowCache, ids: Tensor) -> Tensor | None:
        """Read ids (rows, 1) in a step that `rows` has begun; return the next logits (rows, V) in fp32."""
        self._follow(rows.memory)
        number = len(rows.lengths)
        if self._is_refused or number > MOST_ROWS:
            return None
        if not rows.is_in_pages:
            self._refuse("a layer has a window, no keys and values of its own, or attention that reads no pages")
            return None
        given = {"input_ids": ids, "position_ids": torch.tensor(rows.lengths)[:, None]}
        step = self._steps.get(number) or self._recorded(rows, number, given)
        if step is None:
            return None
        for name, value in given.items():
            step.inputs[name].copy_(value)
        step.replay()()
        return cast("Tensor", step.output.logits)[:, -1].float()

    def forget(self) -> None:
        """Forget all programs, which keep the memory that they know."""
        self._memory = ()
        self._steps.clear()
        self._taken.clear()

    def _follow(self, memory: tuple[Tensor, ...]) -> None:
        """Forget the programs of memory that the rows have left."""
        if len(memory) != len(self._memory) or any(a is not b for a, b in zip(memory, self._memory, strict=True)):
            self._memory = memory
            self._steps.clear()
            self._taken.clear()

    def _recorded(self, rows: RowCache, number: int, given: dict[str, Tensor]) -> _Step | None:
        """Return a new program, or None before its number of rows is frequent, and where there is none."""
        self._taken[number] += 1
        if self._taken[number] <= RECORDED_AFTER:
            return None
        if hooked := foreign_hook(self._model):
            self._refuse(f"`{hooked}` has a forward hook")
            return None
        places = _Places.of(rows)
        try:
            all_seen = {"attention_mask": torch.ones((number, rows.table.columns), dtype=torch.int64)}
            inputs, output, replay, _ = record_step(self._model, places, given, self._graphs.recorder, all_seen)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # of code not made for programs
            self._refuse(reason_of(error))
            return None
        self._steps[number] = _Step(places, inputs, output, replay)
        return self._steps[number]

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self._graphs.tell(f"{reason} (in running batches)")
