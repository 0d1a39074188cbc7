"""Replay the layers of a pass as two CUDA graphs, forward and backward, where passes repeat.

In: the recorded calls of a pass, and the function that runs its layers. Out: what that returns, with its gradients.
A layer whose experts stay on the GPU is hundreds of small launches, which cost Python more time than the GPU. From the
third pass with equal shapes on, one launch replays all layers. Inputs are copied to where the graphs read them;
gradients of parameters come out of one node of autograd, so that hooks and accumulation are PyTorch's.
Refused, with the reason in `told`: layers that draw random numbers, have adapters in host memory, have hooks of others
on adapters or modules, which a replay would not call, and those whose capture fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktc.adapters.as_trained import casts_alone
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.private_api import HOOKS
from ktc.model.manifest.stale_change_guard import StaleChangeGuard
from ktc.model.packed_store.placement import moves_alone
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.part_clock import is_timed
from ktc.training.trainers.phases import ExpertsHooks
from ktc.training.trainers.private_api import (
    end_failed_capture,
    has_hooks,
    hooks_of_all_modules,
    modules_with_tensors,
    pytree,
)
from ktc.training.trainers.random_state import RandomState
from ktc.training.trainers.split_layer import LayerCall, SplitLayer

log = logging.getLogger(__name__)

RunLayers = Callable[[Sequence[ModelCall]], list[Tensor]]
_WARM: Final = 2  # passes before a capture: the first compiles, the second runs on the inputs of the graphs
_WORTH: Final = 8  # replays for which a capture was worth it: 0.15 s were measured, and 25 ms saved by a step
_WASTED: Final = 4  # captures that were not, as passes changed: a run has no further one
_NOT: Final = "layers are not replayed as CUDA graphs"


class PassGraphs:
    """The graphs of the passes of one run, at most one pair of them.

    A pass of other shapes, or of layers that changed, drops them: their memory is as large as a pass. `told` says what
    is replayed, or why nothing is.
    """

    def __init__(self) -> None:
        self.told = ""
        self._refused = ""
        self._signature: Any = None
        self._state: Any = None
        self._passes = 0  # of the signature and the state
        self._wasted = 0
        self._graphs: _Graphs | None = None

    def through(self, layers: Sequence[SplitLayer], chunks: Sequence[ModelCall], run: RunLayers) -> list[Tensor]:
        """Return `run(chunks)`. The caller computes the backward of a pass before the next one."""
        inputs = _Inputs.of(chunks)
        if self._graphs is not None and inputs.signature == self._signature and not is_timed():
            outs = self._graphs.replayed(inputs)
            if state_of(layers) == self._state:  # compared while the GPU computes: graphs keep the weights they read
                return outs
            del outs  # whose node of autograd keeps the graphs
        self._refused = self._refused or reason_against(layers, inputs)
        if self._refused or is_timed():
            self.drop()
            self.told = f"{_NOT}: {self._refused}" if self._refused else ""
            return run(chunks)
        self._count(layers, inputs)
        if self._wasted >= _WASTED:
            self.told = f"{_NOT}: passes changed too often"
            return run(chunks)
        if self._passes <= _WARM or not self._captures(layers, inputs, run):
            return self._as_they_are(inputs, run)
        assert self._graphs is not None
        return self._graphs.replayed(inputs)

    @property
    def captured(self) -> bool:
        """Whether the last pass was replayed, or the next one of its shapes is."""
        return self._graphs is not None

    def begin_run(self) -> None:
        """Forget what an earlier run has shown: its layers and data may have been others."""
        self.drop()
        self.told = self._refused = ""
        self._signature = self._state = None
        self._passes = self._wasted = 0

    def drop(self, *, changed: bool = False) -> None:
        """Free the graphs and their memory. Where passes have `changed`, their capture may have been a waste."""
        if self._graphs is not None:
            self._wasted += changed and self._graphs.replays < _WORTH
            self._graphs, self.told = None, ""
            torch.cuda.empty_cache()

    def _count(self, layers: Sequence[SplitLayer], inputs: _Inputs) -> None:
        """Count the passes that were alike; drop the graphs of others."""
        alike = inputs.signature == self._signature
        state = state_of(layers) if alike else None
        if not alike or (self._passes > 1 and state != self._state):
            self.drop(changed=True)
            self._passes = 0
        self._signature, self._state = inputs.signature, state
        self._passes += 1

    def _as_they_are(self, inputs: _Inputs, run: RunLayers) -> list[Tensor]:
        if self._passes != _WARM:
            return run(inputs.chunks)
        device = inputs.chunks[0].hidden.device
        before = RandomState.now(device)
        outs = run(inputs.copied().calls(hidden=inputs))  # code that is compiled for copies is compiled now
        if not RandomState.now(device).equals(before):
            self._refused = "they draw random numbers"
        return outs

    def _captures(self, layers: Sequence[SplitLayer], inputs: _Inputs, run: RunLayers) -> bool:
        """Capture a pass, and return whether that succeeded."""
        try:
            self._graphs = _Graphs.captured(layers, inputs.copied(), run)
            self.told = "layers are replayed as CUDA graphs"
        except Exception as error:  # a library that waits for the GPU, no memory: the pass runs as before
            log.warning("%s", _NOT, exc_info=error)
            self._refused = f"the capture failed: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
            self.told = f"{_NOT}: {self._refused}"
        if self._graphs is None:  # the error is gone, and with it what its frames had
            torch.cuda.empty_cache()
        return self._graphs is not None


def reason_against(layers: Sequence[SplitLayer], inputs: _Inputs) -> str:
    """Return why a pass is not captured, "" if nothing is known against it."""
    devices = {device for chunk in inputs.chunks for device in chunk.devices}
    trained = _trained(layers)
    reasons = {
        "nothing in them trains": not trained and not any(chunk.hidden.requires_grad for chunk in inputs.chunks),
        "they are on several devices": len(devices) > 1 or next(iter(devices)).type != "cuda",
        "some of their arguments are on another device": any(tensor.device not in devices for tensor in inputs.tensors),
        "some of their adapters are on another device": any(parameter.device not in devices for parameter in trained),
        "some of their adapters have hooks": any(has_hooks(parameter) for parameter in trained),
        "some of their modules have hooks": hooks_of_all_modules() or any(_hooks_inside(layers)),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _trained(layers: Sequence[SplitLayer]) -> list[nn.Parameter]:
    tensors = (tensor for split in layers for _, inside in modules_with_tensors(split.layer) for tensor in inside)
    trained = {id(tensor): tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad}
    return list(trained.values())


def state_of(layers: Sequence[SplitLayer]) -> list[Any]:
    """Return what graphs have as constants: addresses of weights, and modes, scales, dropout and hooks of modules."""
    state: list[Any] = [hooks_of_all_modules()]
    for split in layers:
        for module, tensors in modules_with_tensors(split.layer):
            names = vars(module)
            state += module.training, hooks_of_others(module)
            for tensor in tensors:
                state += tensor.data_ptr(), tensor.requires_grad
            if "scaling" in names and isinstance(module, BaseTunerLayer):
                tuner = cast("Any", module)
                state += tuner.disable_adapters, *tuner.active_adapters, *tuner.scaling.items()
            elif "p" in names:
                state.append(names["p"])  # of dropout
            elif isinstance(module, FusedMoe):
                packed = module.weights.packed
                state += module.offload, packed and packed.packed.data_ptr()
    return state


def hooks_of_others(module: nn.Module) -> int:
    """Return how many functions other than ktc's own are called with a module.

    Those of ktc measure, cast, move tensors or compare attributes, which passes that repeat do alike.
    """
    names = vars(module)
    hooks = (hook for kind in HOOKS if names[kind] for hook in names[kind].values())
    return sum(not _is_of_ktc(hook) for hook in hooks)


def _is_of_ktc(hook: Any) -> bool:
    measures = isinstance(getattr(hook, "__self__", None), ExpertsHooks)
    return measures or isinstance(hook, StaleChangeGuard) or moves_alone(hook) or casts_alone(hook)


def _hooks_inside(layers: Sequence[SplitLayer]) -> Iterator[int]:
    for split in layers:
        for module, _ in modules_with_tensors(split.layer):
            yield hooks_of_others(module)


# Inputs --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Inputs:
    """The calls of a pass, with the tensors in them, each once, and what else they have.

    Calls of layers are often one object for all, and share their tensors: a copy of them does so too.
    """

    chunks: tuple[ModelCall, ...]
    tensors: tuple[Tensor, ...]
    signature: Any

    @classmethod
    def of(cls, chunks: Sequence[ModelCall]) -> _Inputs:
        places: dict[int, int] = {}
        tensors = list[Tensor]()

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return type(leaf), leaf
            if id(leaf) not in places:
                places[id(leaf)] = len(tensors)
                tensors.append(leaf)
            return places[id(leaf)]

        known: dict[int, Any] = {}
        signature = list[Any]()
        for chunk in chunks:
            signature += place(chunk.hidden), place(chunk.real), chunk.devices
            for call in chunk.layers:
                if id(call) not in known:
                    leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
                    known[id(call)] = len(known), call.named, call.autocast, spec, tuple(place(leaf) for leaf in leaves)
                signature.append(known[id(call)])
        layouts = tuple((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors)
        return cls(tuple(chunks), tuple(tensors), (tuple(signature), layouts))

    def copied(self) -> _Inputs:
        """Return the same calls with copies of all tensors, laid out as they are."""
        return self._with(tuple(_copy(tensor) for tensor in self.tensors))

    def calls(self, *, hidden: _Inputs) -> list[ModelCall]:
        """Return the calls with the hidden states of other ones."""
        pairs = zip(self.chunks, hidden.chunks, strict=True)
        return [replace(call, hidden=other.hidden) for call, other in pairs]

    def take(self, others: _Inputs) -> None:
        """Copy the values of other calls of the same signature to the tensors of these."""
        for target, source in zip(self.tensors, others.tensors, strict=True):
            _whole(target).copy_(_whole(source), non_blocking=True)

    def _with(self, tensors: tuple[Tensor, ...]) -> _Inputs:
        made = {id(tensor): copy for tensor, copy in zip(self.tensors, tensors, strict=True)}
        calls: dict[int, LayerCall] = {}

        def copy_of(leaf: Any) -> Any:
            return made[id(leaf)] if isinstance(leaf, Tensor) else leaf

        for chunk in self.chunks:
            for call in chunk.layers:
                if id(call) not in calls:
                    args, kwargs = pytree.tree_map(copy_of, (call.args, dict(call.kwargs)))
                    calls[id(call)] = replace(call, args=args, kwargs=kwargs)
        chunks = tuple(
            replace(
                chunk,
                hidden=made[id(chunk.hidden)],
                layers=tuple(calls[id(call)] for call in chunk.layers),
                real=None if chunk.real is None else made[id(chunk.real)],
            )
            for chunk in self.chunks
        )
        return _Inputs(chunks, tensors, self.signature)


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor without the repetitions of an expanded one."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor.detach()


def _copy(tensor: Tensor) -> Tensor:
    whole = _whole(tensor)
    copy = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device=whole.device)
    copy.copy_(whole)
    copy = copy if whole.shape == tensor.shape else copy.expand(tensor.shape)
    return copy.requires_grad_(tensor.requires_grad)


# Graphs --------------------------------------------------------------------------------------------------------------
class _Graphs:
    """Both graphs of a pass, and the tensors that they read and write."""

    def __init__(self, inputs: _Inputs, parameters: Sequence[nn.Parameter]) -> None:
        self._inputs, self._parameters = inputs, parameters
        self._weights: list[Any] = []  # that the graphs read, also after others have taken their place
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._outs = list[Tensor]()
        self._grads = list[Tensor]()  # of outputs
        self._of_parameters: list[Tensor | None] = []
        self._number = 0
        self.replays = 0

    @classmethod
    def captured(cls, layers: Sequence[SplitLayer], inputs: _Inputs, run: RunLayers) -> _Graphs:
        """Capture the pass. Nothing of it is computed until `replayed`."""
        graphs = cls(inputs, _trained(layers))
        graphs._weights = [*_weights(layers)]
        here = torch.cuda.current_stream(inputs.tensors[0].device)
        with torch.cuda.device(here.device), torch.cuda.stream(here), _without_gradients(graphs._parameters):
            graphs._record(run)
        return graphs

    def _record(self, run: RunLayers) -> None:
        device, pool = self._inputs.tensors[0].device, cast("tuple[int, int]", torch.cuda.graph_pool_handle())
        with _capturing(self._forward, device, pool):
            outs = run(self._inputs.chunks)
        self._grads = [torch.empty_like(out) for out in outs]
        with _capturing(self._backward, device, pool):
            torch.autograd.backward(outs, self._grads)
        self._outs = [out.detach() for out in outs]
        self._of_parameters = [parameter.grad for parameter in self._parameters]

    @property
    def _hidden(self) -> list[Tensor]:
        return [chunk.hidden for chunk in self._inputs.chunks]

    def replayed(self, inputs: _Inputs) -> list[Tensor]:
        """Return the outputs of the layers for other inputs."""
        hidden = [chunk.hidden for chunk in inputs.chunks]
        return list(cast("Any", _Replayed).apply(self, inputs, *hidden, *self._parameters))

    def forward(self, inputs: _Inputs) -> tuple[int, tuple[Tensor, ...]]:
        """Return the number of the replay, and its outputs, which the next one overwrites."""
        self._inputs.take(inputs)
        self._forward.replay()
        self._number += 1
        self.replays += 1
        return self._number, tuple(out.detach() for out in self._outs)

    def backward(self, number: int, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states and of parameters."""
        if number != self._number:
            raise RuntimeError("the layers of a pass were replayed for another pass before its backward")
        self._number += 1  # the graph of a pass is used once
        for parameter, grad in zip(self._parameters, self._of_parameters, strict=True):
            if grad is not None and parameter.grad is not None and parameter.grad.data_ptr() == grad.data_ptr():
                parameter.grad = parameter.grad.clone()  # autograd took the memory that the graph writes again
        for target, grad in zip(self._grads, grads, strict=True):
            target.zero_() if grad is None else target.copy_(grad)
        self._backward.replay()
        made = (*(x.grad for x in self._hidden), *self._of_parameters)
        return tuple(None if grad is None else grad.detach() for grad in made)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> Generator[None]:
    """Capture what is computed inside, with memory of `pool`.

    Raises:
        Exception: the first error. One that invalidates a capture lets its end fail too, by another error.
    """
    inside: list[Exception] = []
    try:
        with torch.cuda.graph(graph, pool=cast("Any", pool), capture_error_mode="thread_local"):
            try:
                yield
            except Exception as error:
                inside.append(error)
                raise
    except Exception as last:
        end_failed_capture(device, pool)
        if inside and inside[0] is not last:
            raise inside.pop() from None
        inside.clear()  # an error has this frame
        raise


def _weights(layers: Sequence[SplitLayer]) -> Iterator[Any]:
    for split in layers:
        for module, tensors in modules_with_tensors(split.layer):
            yield from (tensor.detach() for tensor in tensors)
            if isinstance(module, FusedMoe):
                yield module.weights.packed


class _Replayed(torch.autograd.Function):
    """The layers of a pass as one node of autograd: of its hidden states and of their parameters."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, inputs: _Inputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.number, outs = graphs.forward(inputs)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *cast("_Graphs", ctx.graphs).backward(ctx.number, grads)


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Take the gradients of parameters away inside the context, and give them back."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
