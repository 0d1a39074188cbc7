"""Recognise an experts module of the model's own from its code: a loop over stacked tensors, or batched products.

Input: a module on meta tensors and its call. Output: `OwnExperts`, or None for a module that is called otherwise.
Refused (`NoExperts`), with the reason: code that is more than experts, computes something else in training, or branches
on the number of tokens. The loop runs without data, once for every expert (`unrolled`), and all of it is read.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils import parametrize

from ktc.model.experts.own_module import OwnExperts, Role
from ktc.model.graph.typed import named_modules, tensor_of
from ktc.model.linears.plain import has_hooks
from ktc.stages.capture.canonical import NoExperts
from ktc.stages.capture.circumstances import Inside, Run, dependence, is_asked_before, question
from ktc.stages.capture.forms import interface_code
from ktc.stages.capture.loop_reading import read_batched, read_loop
from ktc.stages.capture.side_effects import has_own_backward, side_effect
from ktc.stages.capture.size_guards import violated_guard
from ktc.stages.capture.states import Given
from ktc.stages.capture.trace import MODES, Trace, without_sizes
from ktc.stages.capture.unrolled import every_expert

Forward = Callable[..., Any]
_TOKENS = 61  # of a call that is made up


def is_candidate(module: nn.Module) -> bool:
    """Return whether a module may be experts: it holds matrices of its own, and none in layers of PyTorch.

    Excluded are the experts that transformers decorates, lists of modules, modules with hooks or computed parameters,
    and modules that contain one of these.
    """
    matrices = 0
    for _, inner in named_modules(module):
        if hasattr(inner, "has_gate") or isinstance(inner, nn.ModuleList) or _runs_more(inner):
            return False
        held = list(inner.parameters(recurse=False))
        if held and type(inner).__module__.startswith("torch."):
            return False
        matrices += sum(parameter.dim() >= 2 for parameter in held)
    return matrices >= 2


def _runs_more(module: nn.Module) -> bool:
    """Return whether calling a module runs more than its `forward` on its own parameters."""
    plain = type(module).__call__ is nn.Module.__call__
    return not plain or has_hooks(module) or parametrize.is_parametrized(module)


def own_experts(
    module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> OwnExperts | None:
    """Return what the module computes, with an empty FQN. The arguments are of a call of `forward` on meta tensors.

    Raises NoExperts, and the exceptions of torch.export and of the module's own code.
    """
    named = _named(forward, args, kwargs)
    inputs = _roles(named)
    if not inputs:
        return None
    count = max((int(p.shape[0]) for p in module.parameters() if p.dim() > 2), default=0)
    try:
        unused, program = 0, _exported(module, forward, named, count, 0)
    except IndexError:  # a mask may have a last place, which no index reaches
        unused, program = 1, _exported(module, forward, named, count, 1)
    names, given = _placeholders(program)
    places = dict(zip(inputs.values(), given, strict=True))
    loop = (read_loop if "index" in places else read_batched)(program.graph, places, names)
    _require_same_shape(program, places["hidden"])
    more = set(module.state_dict()) - {held.name for held in loop.parts.values()}
    if more:  # the module that replaces it has no place for other tensors
        raise NoExperts(f"it holds `{min(more)}` beside its matrices")
    states = {inner: inner.training for _, inner in named_modules(module)}
    try:
        modes = [_operations(module.train(mode), forward, named, count, unused) for mode in (False, True)]
        effects = [
            side_effect(module.train(mode), lambda: _run(forward, named, count, unused)) for mode in (False, True)
        ]
        plain = [_traced(module, forward, named, count, unused, mode) for mode in MODES]
        asked = dependence(module, _runs(forward, named, count, unused))
    finally:
        for inner, training in states.items():
            inner.training = training
    if modes[0] != modes[1]:
        raise NoExperts("it computes something else in training mode")
    if any(other != plain[0] for other in plain):
        raise NoExperts("it computes something else in inference mode or with autocast")
    if reason := next(filter(None, effects), asked):
        raise NoExperts(reason)
    return OwnExperts("", loop.sizes, loop.form, loop.parts, inputs, loop.called)


def more_than_interface(module: nn.Module) -> str:
    """Return why the loop that a model gave its decorated experts is more than what transformers runs instead.

    "" for experts of transformers itself, whose files are known. The proof compares the results of a loop that does not
    run without data.
    """
    code: Any = getattr(type(module).forward, "__wrapped__", None)
    while getattr(code, "__code__", None) is interface_code():  # a derived class was decorated again
        code = getattr(code, "__wrapped__", None)
    if code is None or code.__module__.startswith("transformers.") or is_asked_before():
        return ""
    down, states = cast("Tensor", module.down_proj), {inner: inner.training for inner in module.modules()}
    hidden = down.new_empty(_TOKENS, down.shape[-1 if getattr(module, "is_transposed", False) else -2])
    index = torch.zeros(_TOKENS, 2, dtype=torch.long, device=down.device)
    forward, count = code.__get__(module), int(down.shape[0])
    named = _named(forward, (hidden, index, down.new_empty(_TOKENS, 2)), {})
    try:
        return _more_than_operators(module, forward, named, count) or _asked(module, _runs(forward, named, count, 0))
    finally:
        for inner, training in states.items():
            inner.training = training


def _more_than_operators(module: nn.Module, forward: Forward, named: Mapping[str, Any], count: int) -> str:
    """Return what a loop leaves behind, or where its operators differ; "" where it does not run without data."""
    try:
        for training in (False, True):
            if reason := side_effect(module.train(training), lambda: _run(forward, named, count, 0)):
                return reason
        trained = _traced(module, forward, named, count, 0, MODES[0])
        plain = [_traced(module.eval(), forward, named, count, 0, mode) for mode in MODES]
    except Exception:  # noqa: BLE001 - foreign code without data raises anything
        return ""
    if trained != plain[0]:
        return "it computes something else in training mode"
    return "it computes something else in inference mode or with autocast" if plain[1:] != plain[:1] * 2 else ""


def _asked(module: nn.Module, run: Run) -> str:
    """Return what a loop asks; where it does not run without data, no answer is known, and asking is the reason."""
    try:
        return dependence(module, run)
    except Exception:  # noqa: BLE001 - as above
        return question(module, run)


def _named(forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the parameters, in the order of the parameters."""
    try:
        return dict(inspect.signature(forward).bind(*args, **kwargs).arguments)
    except TypeError:
        return {}


def _roles(named: Mapping[str, Any]) -> dict[str, Role]:
    """Return the role of each parameter, empty for a call that is not one of experts."""
    if not all(isinstance(given, Tensor) and given.is_meta for given in named.values()):
        return {}
    tensors = cast("Mapping[str, Tensor]", named)
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() >= 2}
    indices = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.long and tensor.dim() == 2}
    if len(tensors) == 1 and len(floats) == 1:
        return dict.fromkeys(floats, "hidden")
    if len(tensors) != 3 or len(floats) != 2 or len(indices) != 1:
        return {}
    (chosen,) = indices.values()
    weights = [name for name, tensor in floats.items() if tensor.shape == chosen.shape]
    if len(weights) != 1:
        return {}
    return {n: "index" if n in indices else "weights" if n in weights else "hidden" for n in tensors}


def _runs(forward: Forward, named: Mapping[str, Any], count: int, unused: int) -> Run:
    """Return the function that runs `forward` with other tensors, for `dependence`."""

    def run(given: Given, inside: Inside) -> object:
        tensors = {name: given(tensor) for name, tensor in named.items()}
        with every_expert(count, unused), inside():
            return forward(**tensors)

    return run


def _run(forward: Forward, named: Mapping[str, Any], count: int, unused: int) -> object:
    with every_expert(count, unused):
        return forward(**named)


class _Run(nn.Module):
    """The module with tensors by position, run once for every expert."""

    def __init__(self, block: nn.Module, forward: Forward, names: Sequence[str], count: int, unused: int) -> None:
        super().__init__()
        self.block = block
        self._call, self._names, self._count, self._unused = forward, tuple(names), count, unused

    def forward(self, *tensors: Tensor) -> Tensor:
        with every_expert(self._count, self._unused):
            result = self._call(**dict(zip(self._names, tensors, strict=True)))
        if not isinstance(result, Tensor):
            raise NoExperts("it returns more than hidden states")
        return result


def _exported(
    module: nn.Module, forward: Forward, named: Mapping[str, Any], count: int, unused: int
) -> ExportedProgram:
    """Export the module for any number of tokens. Raises NoExperts where the code depends on their number."""
    tensors = tuple(cast("Mapping[str, Tensor]", named).values())
    dynamic = tuple(dict.fromkeys(range(max(1, tensor.dim() - 1)), Dim.AUTO) for tensor in tensors)
    before = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = _Run(module, forward, list(named), count, unused)
            program = torch.export.export(run, tensors, dynamic_shapes=(dynamic,), strict=False)
    finally:
        logging.getLogger("torch").setLevel(before)
    fixed = [node for node in _placeholders(program)[1] if isinstance(_shape(node)[0], int)]
    batched = len(named) == 1  # then there are equally many rows for each expert
    guard = violated_guard(program, count if batched else 1)
    if fixed or guard:
        raise NoExperts("its code depends on the number of tokens")
    return program


def _placeholders(program: ExportedProgram) -> tuple[dict[fx.Node, str], list[fx.Node]]:
    """Return the parameters' names by their nodes, and the nodes of the inputs in their order."""
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    if signature.inputs_to_lifted_tensor_constants:
        raise NoExperts("it computes with a tensor that it creates itself")
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    names = {node: held[node.name].removeprefix("block.") for node in nodes if node.name in held}
    return names, [node for node in nodes if node.name not in held]


def _shape(node: fx.Node) -> tuple[Any, ...]:
    held = tensor_of(node)
    return () if held is None else tuple(held.shape)


def _require_same_shape(program: ExportedProgram, hidden: fx.Node) -> None:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    (result,) = output.all_input_nodes
    if list(map(_hint, _shape(result))) != list(map(_hint, _shape(hidden))):
        raise NoExperts("its result has another shape than its hidden states")


def _hint(size: Any) -> int:
    return int(cast("Any", size.node).hint) if isinstance(size, torch.SymInt) else int(size)


class _Recorder(Trace):
    """A trace that also records whether numbers were computed without gradients."""

    blocked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.blocked |= not torch.is_grad_enabled() and isinstance(result, Tensor) and result.is_floating_point()
        return result


def _traced(
    module: nn.Module, forward: Forward, named: Mapping[str, Any], count: int, unused: int,
    mode: Callable[[], AbstractContextManager[object]],
) -> list[str]:  # fmt: skip
    """Return the operators of a call without gradients in a mode of torch."""
    with mode(), torch.no_grad(), Trace(module) as trace:
        _run(forward, named, count, unused)
    return without_sizes(trace.rows)


def _operations(module: nn.Module, forward: Forward, named: Mapping[str, Any], count: int, unused: int) -> list[str]:
    """Return the operators of a call. Raises NoExperts where gradients are not those of the operators."""
    tensors = cast("Mapping[str, Tensor]", named)
    given = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    with torch.enable_grad(), _Recorder(module) as recorder, every_expert(count, unused):
        result = cast("Tensor", forward(**given))
    if recorder.blocked or has_own_backward(result):
        raise NoExperts("it computes gradients in its own way")
    return recorder.rows
