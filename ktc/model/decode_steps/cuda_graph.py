"""Decoding steps of a model on a GPU as CUDA graphs: captured once per batch size and capacity, then replayed.

In: the arguments of a step as `generate` makes them, one new token per sequence after a cache. Out: the model's output;
the cache has one position more. A step is the model's own forward on fixed addresses (`StepMemory`), with experts of
the CPU as host nodes. Batches are filled up to a power of two by repeating the first sequence, which adds no expert.
A graph has the addresses of weights and adapters, and no hook runs in it: it serves the model in the state in which it
was captured, and the first step of each `generate` compares the states (`ModelState`).
A step that cannot be captured is computed by the model itself, and the log says why, once (L451). A capture that fails
is not repeated for the same cache, nor for others in the same state of the model; out of memory, the next cache tries.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, masking_utils
from transformers.cache_utils import Cache

from ktc.diagnostics import Diagnostic, render
from ktc.model.attention.sparse import indexed_layers
from ktc.model.decode_steps.graph_replay import Record, Replay, Wait, record_graph, with_calls
from ktc.model.decode_steps.model_state import ModelState, foreign_hook
from ktc.model.decode_steps.step_ahead import PendingStep, StepAhead
from ktc.model.decode_steps.step_memory import DOUBLED, StepMemory, batch_of, capacity_for, length_of, rounded, unfit
from ktc.model.experts.host.beside import SideStream, StreamOrder
from ktc.model.experts.host.host_node import HostNodes, Launch, on_current_stream
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.kernels.step_context import StepContext

log = logging.getLogger(__name__)

CACHE: Final = "past_key_values"
_IGNORED: Final = frozenset({CACHE, "cache_position", "use_cache", "return_dict", "logits_to_keep"})
_READ: Final = ("input_ids", "position_ids", "attention_mask")
_MAKE_MASKS: Final = "create_masks_for_generate"  # of a model with masks of its own, or of transformers
_MEMORIES: Final = 6  # at most, of all sizes
Inputs = dict[str, Any]
Begun = tuple["CapturedStep", Inputs]  # a step, and the inputs for which it was begun


@dataclass(frozen=True, slots=True)
class StepRecorder:
    """How steps are captured.

    `record` computes an output on a device of type `device` and returns it with a function that computes it again, at
    the same address. The tensors that it takes change between runs. `launch` puts the experts of the CPU into a stream
    of a GPU, in the order of a new `order`. With `rounded`, batches are filled up to a power of two. With `ahead`,
    `generate` continues while a step is computed. `code` is that of the warning about steps that are not captured.
    """

    record: Record = record_graph
    device: str = "cuda"
    launch: Launch | None = on_current_stream
    order: Callable[[], StreamOrder] = SideStream
    rounded: bool = True
    ahead: bool = True
    code: str = "L451"
    form: str = "a CUDA graph"


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the steps of `cache` are not captured; with `of_state`, also those of other caches in the same state."""

    cache: weakref.ref[DynamicCache]
    reason: str
    of_state: bool


_BROKEN: Final = "previous error during capture"  # in the words of CUDA
_ALL: Final[weakref.WeakSet[DecodeGraphs]] = weakref.WeakSet()


def _renew_locks() -> None:
    """Give a child of a fork locks without a holder: a thread that it does not have may hold the old ones."""
    for graphs in _ALL:
        graphs._busy = threading.RLock()  # pyright: ignore[reportPrivateUsage]
        graphs._last = None  # pyright: ignore[reportPrivateUsage] - a thread of the parent waits for it


os.register_at_fork(after_in_child=_renew_locks)


class DecodeGraphs:
    """The captured steps of one model. Copies of the model begin without any."""

    def __init__(self, recorder: StepRecorder | None = None) -> None:
        self.recorder = recorder or StepRecorder()
        self._busy = threading.RLock()
        _ALL.add(self)
        self._memories: list[StepMemory] = []  # least recently used first
        self._steps: dict[int, CapturedStep] = {}  # by the id of their memory
        self._state: ModelState | None = None
        self._logged: set[str] = set()
        self._refusal: _Refusal | None = None  # of `_state`
        self._last: PendingStep | None = None  # step of a `generate` that continues meanwhile

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeGraphs:
        return DecodeGraphs(self.recorder)

    def __reduce__(self) -> Any:
        return DecodeGraphs, ()

    def step(self, model: PreTrainedModel, **inputs: Any) -> Any:
        """Return the output of `model(**inputs)`. A captured step computes it, where one can.

        Where the model's context has a `StepAhead`, that waits for the step.
        """
        with self._busy:
            ahead = StepContext.of(model).step_ahead
            if ahead is not None:
                ahead.finish()
            self._settle()
            reason = self._unserved(model, inputs)
            captured = reason or self._captured(model, inputs)
            if ahead is not None:
                ahead.begun = None
            if isinstance(captured, CapturedStep):
                output, step = captured.begin(inputs)
                if ahead is None:
                    step.finish()
                else:
                    self._last = step
                    ahead.last, ahead.begun = step, (captured, inputs)
                return output
        self.tell(captured)
        return model(**inputs)

    def again(self, begun: Begun, ahead: StepAhead) -> PendingStep | None:
        """Begin the step that `begun` again, for what its inputs hold by now. The last one may be under way.

        None where the memory of the step is no longer that of the cache. The caller looks for room, and shows the
        positions of the cache.
        """
        captured, inputs = begun
        with self._busy:
            if self._last is not ahead.last:
                self._settle()
            memory, cache = captured.memory, inputs[CACHE]
            if self._steps.get(id(memory)) is not captured or not memory.is_used_by(cache):
                return None
            step = self._last = ahead.last = PendingStep(captured.replay())
            return step

    def clear(self) -> None:
        """Release the graphs and memories of all steps, and log warnings again.

        Caches keep their content; the next step is captured again.
        """
        with self._busy:
            self._settle()
            self._memories.clear()
            self._steps.clear()
            self._logged.clear()
            self._state = self._refusal = None

    def _settle(self) -> None:
        """Wait for a step that another `generate` has begun: it uses memory and graphs of this model."""
        if self._last is not None:
            self._last.settle()
        self._last = None  # not after an interrupt

    def _unserved(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> str:
        """Return why a call cannot be a captured step, "" if it can."""
        given = {name for name, value in inputs.items() if value is not None and value is not False}
        more = sorted(given - {*_READ, *_IGNORED})
        if more:
            return f"it is called with `{more[0]}`"
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        device = self.recorder.device
        if ids is None or ids.device.type != device or ids.shape[1] != 1:
            return f"it is not one new token per sequence on `{device}`"
        if model.training or torch.is_grad_enabled():
            return "it computes gradients"
        if inputs.get("position_ids") is None:
            return "it has no `position_ids`"
        if mask is not None and mask.dim() != 2:
            return "its attention mask is not one of padding"
        return unfit(inputs.get(CACHE)) or _misshapen(inputs)

    def _captured(self, model: PreTrainedModel, inputs: Inputs) -> CapturedStep | str:
        """Return the step on the memory that holds the cache, or why there is none."""
        cache: DynamicCache = inputs[CACHE]
        memory = next((memory for memory in self._memories if memory.is_used_by(cache)), None)
        try:
            if memory is None or not memory.holds(cache):
                if reason := self._refused(model, cache):
                    return reason
                memory = self._taken(model, cache, inputs["input_ids"].shape[0])
            if id(memory) not in self._steps:
                self._steps[id(memory)] = capture(model, memory, inputs, self.recorder)
            return self._steps[id(memory)]
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # of code that cannot be captured
            reason = reason_of(error)
            self._memories.clear()
            self._steps.clear()
            # pinned memory has a RuntimeError with these words
            lacks_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in reason
            self._refusal = _Refusal(weakref.ref(cache), reason, of_state=not lacks_memory)
            return reason

    def _taken(self, model: PreTrainedModel, cache: DynamicCache, batch: int) -> StepMemory:
        """Copy a cache into a free memory of its size, or into a new one.

        For a new long one, those are dropped that are smaller and that no other cache uses: kept for later caches, they
        would take several times the memory of the last. `cache` itself keeps the memory that it views until it is
        copied.
        """
        rows, capacity = rounded(batch) if self.recorder.rounded else batch, capacity_for(length_of(cache) + 1)
        memory = next((m for m in self._memories if m.is_free(cache) and m.serves(cache, rows, capacity)), None)
        if memory is None:
            smaller = [m for m in self._memories if m.rows == rows and DOUBLED <= m.capacity < capacity]
            for old in [m for m in smaller if m.is_idle(cache)]:
                self._forget(old)
            idle = [m for m in self._memories if m.is_idle(cache) and not m.is_used_by(cache)]
            for old in idle[: max(0, len(self._memories) + 1 - _MEMORIES)]:
                self._forget(old)
            memory = StepMemory(cache, rows, capacity, indexed_layers(model, self.recorder.device))
        else:
            self._memories.remove(memory)
        memory.take(cache)
        for other in self._memories:
            other.leave(cache)
        self._memories.append(memory)
        return memory

    def _forget(self, memory: StepMemory) -> None:
        """Drop a memory, and the step that was captured on it."""
        self._memories.remove(memory)
        self._steps.pop(id(memory), None)

    def _refused(self, model: PreTrainedModel, cache: DynamicCache) -> str:
        """Return why no step of `cache` is captured, "" if one can be. Forget the steps of another state."""
        if self._refusal is not None and self._refusal.cache() is cache:
            return self._refusal.reason  # states are compared once for each cache
        state = ModelState.of(model)
        if not state.is_same(self._state):
            self._steps.clear()
            self._state, self._refusal = state, None
        reason = self._refusal.reason if self._refusal is not None and self._refusal.of_state else ""
        if not reason and (hooked := foreign_hook(model)):
            reason = f"`{hooked}` has a forward hook"
        self._refusal = _Refusal(weakref.ref(cache), reason, of_state=True) if reason else None
        return reason

    def tell(self, reason: str) -> None:
        """Log why a step is not captured, once for each reason."""
        if reason not in self._logged:
            self._logged.add(reason)
            message = f"a decoding step runs without {self.recorder.form}: {reason}"
            hint = f"see `ktc explain {self.recorder.code}`"
            log.warning("%s", render([Diagnostic(self.recorder.code, message, hint=hint, severity="warning")]))


def reason_of(error: BaseException) -> str:
    """Return the first line of an error. The end of a capture reports that an error came before: that one counts."""
    while error.__context__ is not None and _BROKEN in str(error):
        error = error.__context__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _misshapen(inputs: Mapping[str, Any]) -> str:
    """Return which input has another shape than a step on its cache, "" if none has."""
    cache: DynamicCache = inputs[CACHE]
    batch, length, mask = inputs["input_ids"].shape[0], length_of(cache) + 1, inputs.get("attention_mask")
    if batch != batch_of(cache):
        return f"it has {batch} sequences, and its cache {batch_of(cache)}"
    if mask is not None and (mask.shape[0] not in (1, batch) or mask.shape[1] != length):
        return f"its attention mask has the shape {list(mask.shape)} for {length} positions"
    positions: Tensor = inputs["position_ids"]
    if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != 1:
        return f"its `position_ids` have the shape {list(positions.shape)}"
    return ""


# One step --------------------------------------------------------------------------------------------------------
class StepPlaces(Protocol):
    """Where a step reads and writes keys and values: see `StepMemory`."""

    @property
    def position(self) -> Tensor: ...

    @property
    def cache(self) -> Cache: ...

    @property
    def tensors(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of a model on `memory`: `replay` reads `inputs` and writes the logits (rows, 1, V) of `output`."""

    memory: StepMemory
    inputs: Inputs
    output: Any
    replay: Replay
    nodes: HostNodes | None

    def begin(self, inputs: Inputs) -> tuple[Any, PendingStep]:
        """Begin the step for `inputs`, whose cache the memory holds. The output is there when the step is done."""
        cache: DynamicCache = inputs[CACHE]
        length, batch = length_of(cache), inputs["input_ids"].shape[0]
        self.memory.position.fill_(length)
        values = step_inputs(self.memory, inputs)
        self.memory.encode(values["attention_mask"], length)
        for name, value in values.items():
            self.inputs[name].copy_(value)
        replayed = self.replay()

        def end() -> None:
            try:
                replayed()
            except BaseException:
                self.memory.show(cache, length)
                raise

        step = PendingStep(end)
        try:
            self.memory.show(cache, length + 1)
            logits = self.output.logits[:batch].clone()
        except BaseException as error:
            first = step.error_before(error)
            self.memory.show(cache, length)
            if first is not error:
                raise first  # noqa: B904 - its cause is set
            raise
        return type(self.output)(logits=logits, past_key_values=cache), step


def capture(model: PreTrainedModel, memory: StepMemory, inputs: Inputs, recorder: StepRecorder) -> CapturedStep:
    """Record a step of `model` on a memory that holds the cache of `inputs`.

    Raises what the model and `recorder.record` raise, and `ValueError` for an output with more than logits.
    """
    memory.position.fill_(length_of(inputs[CACHE]))
    return CapturedStep(memory, *record_step(model, memory, step_inputs(memory, inputs), recorder))


def record_step(
    model: PreTrainedModel, memory: StepPlaces, example: Inputs, recorder: StepRecorder, constant: Inputs | None = None
) -> tuple[Inputs, Any, Replay, HostNodes | None]:  # fmt: skip
    """Record a step of `model` that reads ids, positions and present columns like those of `example`, of all rows.

    Inputs that are `constant` are the same in all steps. Return the inputs that the step reads, the output that it
    writes, a function that repeats it, and its host nodes. Who waits for a repetition gets the errors of its experts.
    Raises as `capture`.
    """
    with torch.inference_mode(mode=False):  # later steps write to them, perhaps outside of it
        inputs = {name: value.clone() for name, value in example.items()}
    nodes = None if recorder.launch is None else HostNodes(recorder.launch, recorder.order())
    context = StepContext.given_to(model)

    def compute() -> Any:
        read = inputs | (constant or {})
        given = read | {"attention_mask": masks_of(model, memory, read)}
        with nullcontext() if nodes is None else nodes.recorded(context):
            return model(**given, past_key_values=memory.cache, use_cache=True, return_dict=True)

    changing = *inputs.values(), *memory.tensors
    output, replay = recorder.record(compute, inputs["input_ids"].device, changing, nodes, context)
    more = sorted(name for name, value in output.items() if value is not None and name not in ("logits", CACHE))
    if more:
        raise ValueError(f"the model returns `{more[0]}`")
    stores = tuple(dict.fromkeys(m.kept.store for m in model.modules() if isinstance(m, FusedMoe) and m.kept))

    last: Wait | None = None

    def advanced() -> Wait:
        nonlocal last
        for store in stores:
            store.advance()
        if nodes is None:
            return replay()
        last = with_calls(replay, nodes, last)
        return _with_errors(last, nodes, model)

    return inputs, output, advanced, nodes


def _with_errors(wait: Wait, nodes: HostNodes, model: nn.Module) -> Wait:
    """Return a function that waits for the last replay, and raises the errors of its experts."""
    number = nodes.begun  # another replay may begin before the end of this one

    def waited() -> None:
        try:
            wait()
        finally:  # an error of the GPU may be a consequence of theirs
            nodes.check(lambda packed: layer_name(model, packed), number)

    return waited


def step_inputs(memory: StepMemory, inputs: Mapping[str, Any]) -> Inputs:
    """Return the inputs of a step on `memory`, for all rows: ids, positions, and which columns are not padding."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    batch, length = ids.shape[0], length_of(inputs[CACHE]) + 1
    present = torch.ones((batch, memory.capacity), dtype=torch.int64, device=ids.device)
    if mask is not None:
        present[:, :length] = mask
    values = {"input_ids": ids, "position_ids": inputs["position_ids"], "attention_mask": present}
    return {name: _rows(value, batch, memory.rows) for name, value in values.items()}


def masks_of(model: PreTrainedModel, memory: StepPlaces, inputs: Inputs) -> Any:
    """Return the masks of a step as `generate` makes them for a static cache.

    They are (rows, 1, 1, capacity), or one for each kind of layer. Columns after the position are masked. Where
    transformers passes arguments to a kind of mask that it does not take (5.17 to that of chunks, as of Llama 4), it is
    the columns that are not padding: the model's forward makes its masks of them, in the step.
    """
    ids = inputs["input_ids"]
    make: Any = getattr(model, _MAKE_MASKS, getattr(masking_utils, _MAKE_MASKS))
    no_values = torch.empty((*ids.shape, 0), dtype=model.dtype, device=ids.device)  # only the sizes are read
    options: dict[str, Any] = {
        **inputs,
        "config": model.config,
        "inputs_embeds": no_values,
        "past_key_values": memory.cache,
        "cache_position": memory.position,
    }
    known = inspect.signature(make).parameters
    try:
        masks = make(**{name: value for name, value in options.items() if name in known})
    except TypeError:
        return inputs["attention_mask"]
    if masks is None:
        raise ValueError("the attention of the model takes no mask")
    return masks


def _rows(value: Tensor, batch: int, rows: int) -> Tensor:
    """Repeat the first of `batch` rows up to `rows`. A value of one row is every sequence's."""
    value = value.expand(batch, *value.shape[1:])
    return torch.cat((value, value[:1].expand(rows - batch, *value.shape[1:])))


def layer_name(model: nn.Module, packed: PackedExperts) -> str:
    """Return the name of the module whose experts these are."""
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    return next(name for name, module in modules if isinstance(module, FusedMoe) and module.weights.packed is packed)
