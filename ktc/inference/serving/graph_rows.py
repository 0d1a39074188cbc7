"""`GraphRows`: steps of a running batch on a GPU as CUDA graphs, on the batch's `RowMemory`.

In: the rows of a batch, and their last tokens. Out: the logits of every row's next token, which are there when `wait`
returns. A graph belongs to a number of slots, a power of two, and to the addresses of the memory
(`ktc.model.decode_steps.cuda_graph`). Rows that join and leave change its inputs alone: ids, positions, the column of
the new tokens, and which columns a row has. Model states are not compared: updates are the engine's own, and drop all
graphs. While answers run, a step that has no graph yet is computed without one, and the next one is captured: rows
wait for the first kernels of a shape and for a capture in two steps, not in one. Refused with a warning (L451): a model
that cannot be captured. Where a graph of fewer slots was captured, and one of more is not, or memory was missing for
it, the same step is computed without a graph. A captured step may begin again while the last one is under way: what it
reads is on the device then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.row_memory import RowMemory, RowPlaces
from ktc.model.attention.sparse import Sparse, indexed_layers, unindexed
from ktc.model.attention.step_index import IndexedLayer
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder, reason_of, record_step
from ktc.model.decode_steps.device_feed import feed
from ktc.model.decode_steps.graph_replay import Compute, Replay, Wait
from ktc.model.decode_steps.model_state import foreign_hook


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the first slots; the memory of `places` lives as long as it may be replayed."""

    places: RowPlaces
    inputs: dict[str, Tensor]
    output: Any
    replay: Replay
    is_captured: bool


class GraphRows:
    """The graphs of one batch, for the state in which the model serves its adapter. `refused` is why there are none."""

    def __init__(self, model: PreTrainedModel, graphs: DecodeGraphs) -> None:
        self.refused = ""
        self._model, self._graphs = model, graphs
        self._version = -1  # of the memory that the graphs have the addresses of
        self._steps: dict[int, _Step] = {}
        self._due = set[int]()  # slots whose next step is captured
        self._beyond = 0  # the fewest slots for whose capture memory was missing, 0 for none
        self._has_captured = False

    @classmethod
    def of(cls, model: Any) -> GraphRows | None:
        """Return those of a model whose steps are captured, None for others."""
        graphs = getattr(model, "decode_graphs", None)
        return None if graphs is None or not graphs.recorder.rounded else cls(model, graphs)

    @property
    def indexed(self) -> dict[int, IndexedLayer]:
        """How the layers of its memory are indexed whose attention is sparse."""
        return indexed_layers(self._model, self._graphs.recorder.device)

    @property
    def unfit(self) -> str:
        """Why no step of the model is captured, "" if one may be."""
        return _unfit_model(self._model, self._graphs.recorder.device)

    def is_ready(self, memory: RowMemory) -> bool:
        """Return whether the next step of the rows is a replay, so that it may run within another pass."""
        step = self._steps.get(memory.slots_of_step)
        is_there = step is not None and step.is_captured and memory.version == self._version
        return is_there and not memory.needs_move

    @torch.no_grad()
    def begin(
        self, memory: RowMemory, tokens: list[int], slots: int = 0, at_once: bool = False
    ) -> tuple[Tensor, Wait] | None:
        """Begin to read a token of every row; return the next logits (rows, V) in fp32, and a function that waits.

        The step has at least `slots` slots; with `at_once` it is captured if it was not. None where it cannot be
        captured, for a reason in `refused`. Raises as a capture without memory, and `wait` as the kernels of the step.
        """
        slots = memory.begin_step(slots)
        self._follow(memory.version)
        repeated = slots - len(tokens)
        ids = torch.tensor([*tokens, *tokens[:1] * repeated])[:, None]
        positions = torch.tensor([*memory.lengths, *memory.lengths[:1] * repeated])[:, None]
        given = {"input_ids": ids, "position_ids": positions}
        step = self._steps.get(slots)
        if step is None or slots in self._due:
            step = self._recorded(memory.places(slots), slots, given, at_once or slots in self._due)
        if step is None:
            return None
        for name, value in given.items():
            step.inputs[name].copy_(value)
        return self._begun(step, len(tokens))

    @property
    def goes_ahead(self) -> bool:
        """Whether a step may begin while the last one is under way."""
        return self._graphs.recorder.ahead

    @torch.no_grad()
    def again(self, memory: RowMemory, tokens: Tensor) -> tuple[Tensor, Wait]:
        """Begin the last step again, for the same rows and tokens (rows,) that the device chooses; see `begin`.

        The memory must be ready and have a column. The last step may be under way, and no other.
        """
        step = self._steps[memory.begin_step()]
        feed(step.inputs, tokens)
        return self._begun(step, len(tokens))

    def _begun(self, step: _Step, rows: int) -> tuple[Tensor, Wait]:
        """Begin a replay for what the inputs hold, and return its logits and a function that waits."""
        wait = step.replay()
        logits = cast("Tensor", step.output.logits)[:rows, -1]
        try:
            return logits.to(torch.float32, copy=True), wait  # the next step writes to the same address
        except BaseException:
            wait()
            raise

    def missing(self, memory: RowMemory) -> int:
        """Return the fewest slots of `memory` without a captured step, 0 for none, or where they cannot be captured."""
        if self.refused or not memory.slots:
            return 0
        is_known = memory.version == self._version
        known = self._steps.keys() - self._due if is_known else frozenset[int]()
        slots = next((1 << power for power in range(memory.slots.bit_length()) if 1 << power not in known), 0)
        return 0 if is_known and self._is_beyond(slots) else slots

    def lacked(self, memory: RowMemory, slots: int) -> None:
        """Capture no step of `slots` or more while the addresses of `memory` stay: memory was missing for it."""
        self._follow(memory.version)
        self._beyond = slots
        self._due = {due for due in self._due if not self._is_beyond(due)}

    def _is_beyond(self, slots: int) -> bool:
        return 0 < self._beyond <= slots

    def forget(self) -> None:
        """Forget all graphs, which keep the memory that they know."""
        self._version, self._beyond = -1, 0
        self._steps.clear()
        self._due.clear()

    def refuse(self, reason: str) -> None:
        """Record why there are no graphs, and report it once."""
        self.refused = reason
        self._steps.clear()
        self._due.clear()
        self._graphs.tell(f"{reason} (in running batches)")

    def _follow(self, version: int) -> None:
        """Forget the graphs of memory that the rows have left."""
        if version != self._version:
            self.forget()
            self._version = version

    def _recorded(self, places: RowPlaces, slots: int, given: dict[str, Tensor], captures: bool) -> _Step | None:
        """Return a new step, or None for a model that cannot be captured. Without `captures` the next is one."""
        if reason := self.unfit:
            self.refuse(reason)
            return None
        is_beyond = self._is_beyond(slots)
        captures = captures and not is_beyond
        recorder = self._graphs.recorder
        plain = replace(recorder, record=_computed_again, launch=None)
        self._due.discard(slots)
        try:
            step = self._record(places, given, recorder if captures else plain)
        except Exception as error:  # of code that cannot be captured, which raises anything
            if memory_fault(error) is not None:
                raise
            reason = reason_of(error)
            if not self._has_captured:
                self.refuse(reason)
                return None
            self._graphs.tell(f"{reason} (in running batches of {slots})")
            step = self._record(places, given, plain)
        else:
            self._has_captured |= captures
            self._due.update(() if captures or is_beyond else [slots])
        self._steps[slots] = step
        return step

    def _record(self, places: RowPlaces, given: dict[str, Tensor], recorder: StepRecorder) -> _Step:
        example = {name: value.to(places.position.device) for name, value in given.items()}
        recorded = record_step(self._model, places, example, recorder, {"attention_mask": places.present})
        return _Step(places, *recorded[:3], is_captured=recorder is self._graphs.recorder)


def _unfit_model(model: PreTrainedModel, device: str) -> str:
    """Return why no step of a model is captured, "" if one may be."""
    if hooked := foreign_hook(model):
        return f"`{hooked}` has a forward hook"
    sparse = (module for module in model.modules() if isinstance(getattr(module, "sparse", None), Sparse))
    return next((reason for module in sparse if (reason := unindexed(module, device))), "")


def _computed_again(compute: Compute, *_: object) -> tuple[Any, Replay]:
    """Return the output of `compute`, and a function that computes it again at the same address.

    The first call of that function leaves the output as it is: it is for the same inputs.
    """
    output: Any = compute()
    output.logits = output.logits.clone()
    is_new = True

    def replay() -> Callable[[], None]:
        nonlocal is_new
        if not is_new:
            output.logits.copy_(compute().logits)
        is_new = False
        return lambda: None

    return output, replay
