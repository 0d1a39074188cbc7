"""Recognise a model's own experts module by its code: a loop over stacked tensors, or batched products.

Input: a module on meta tensors and its call. Output: `OwnExperts`, or None for a module that is called otherwise.
Refused (`NoExperts`), with the reason: code that is more than experts, computes something else in training, or branches
on the number of tokens. The loop runs without data, once for every expert (`unrolled`), and all of it is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils import parametrize

from ktc.model.experts.own_module import OwnExperts, Role
from ktc.model.graph import ops
from ktc.model.graph.typed import named_modules, traced_size
from ktc.model.linears.plain import has_hooks
from ktc.stages.capture.canonical import NoExperts
from ktc.stages.capture.circumstances import Inside, are_circumstances_checked, dependence, question
from ktc.stages.capture.forms import interface_code
from ktc.stages.capture.loop_reading import read_batched, read_loop
from ktc.stages.capture.side_effects import has_own_backward, side_effect
from ktc.stages.capture.size_guards import violated_guard
from ktc.stages.capture.states import Given
from ktc.stages.capture.trace import MODES, Trace, silent_torch, training_mode, without_sizes
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
        parameters = list(inner.parameters(recurse=False))
        if parameters and type(inner).__module__.startswith("torch."):
            return False
        matrices += sum(parameter.dim() >= 2 for parameter in parameters)
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
    call = _Call(module, forward, named, max((int(p.shape[0]) for p in module.parameters() if p.dim() > 2), default=0))
    try:
        program = _exported(call)
    except IndexError:  # a mask may have a last place, which no index reaches
        call = replace(call, unused=1)
        program = _exported(call)
    names, given = _placeholders(program)
    nodes = dict(zip(inputs.values(), given, strict=True))
    loop = (read_loop if "index" in nodes else read_batched)(program.graph, nodes, names)
    _require_same_shape(program, nodes["hidden"])
    more = set(module.state_dict()) - {layout.name for layout in loop.parts.values()}
    if more:  # the module that replaces it has no place for other tensors
        raise NoExperts(f"it holds `{min(more)}` beside its matrices")
    with training_mode(module):
        modes = [call.in_mode(training).operations() for training in (False, True)]
        effects = [side_effect(module.train(training), call.run) for training in (False, True)]
        plain = [call.traced(mode) for mode in MODES]
        dependent = dependence(module, call.run_with)
    if modes[0] != modes[1]:
        raise NoExperts("it computes something else in training mode")
    if any(other != plain[0] for other in plain):
        raise NoExperts("it computes something else in inference mode or with autocast")
    if reason := next(filter(None, effects), dependent):
        raise NoExperts(reason)
    return OwnExperts("", loop.sizes, loop.form, loop.parts, inputs, loop.called)


def more_than_interface(module: nn.Module) -> str:
    """Return what a model's own loop does beyond the experts interface that transformers runs instead of it.

    It is "" for experts of transformers itself, whose files are known. The proof compares the results of a loop that
    does not run without data.
    """
    code: Any = getattr(type(module).forward, "__wrapped__", None)
    while getattr(code, "__code__", None) is interface_code():  # a derived class was decorated again
        code = getattr(code, "__wrapped__", None)
    if code is None or code.__module__.startswith("transformers.") or are_circumstances_checked():
        return ""
    down = cast("Tensor", module.down_proj)
    hidden = down.new_empty(_TOKENS, down.shape[-1 if getattr(module, "is_transposed", False) else -2])
    index = torch.zeros(_TOKENS, 2, dtype=torch.long, device=down.device)
    forward = code.__get__(module)
    named = _named(forward, (hidden, index, down.new_empty(_TOKENS, 2)), {})
    call = _Call(module, forward, named, int(down.shape[0]))
    with training_mode(module):
        return _more_than_operators(call) or _circumstance(call)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a loop over `count` experts, which runs on meta tensors once for every expert.

    `named` are the arguments by parameter. The last `unused` places of a mask of experts are not experts.
    """

    module: nn.Module
    forward: Forward
    named: Mapping[str, Any]
    count: int
    unused: int = 0

    def in_mode(self, training: bool) -> _Call:
        """Return the call, with its module in training or in evaluation from now on."""
        self.module.train(training)
        return self

    def run(self, **tensors: Any) -> Any:
        """Return the result of the call, or of one with other tensors."""
        with every_expert(self.count, self.unused):
            return self.forward(**(tensors or self.named))

    def run_with(self, given: Given, inside: Inside) -> object:
        """Run the call in a state of `dependence`."""
        tensors = {name: given(tensor) for name, tensor in self.named.items()}
        with every_expert(self.count, self.unused), inside():
            return self.forward(**tensors)

    def traced(self, mode: Callable[[], AbstractContextManager[object]]) -> list[str]:
        """Return the operators of the call without gradients in a mode of torch."""
        with mode(), torch.no_grad(), Trace(self.module) as trace:
            self.run()
        return without_sizes(trace.rows)

    def operations(self) -> list[str]:
        """Return the operators of the call. Raises NoExperts where gradients are not those of the operators."""
        tensors = cast("Mapping[str, Tensor]", self.named)
        given = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
        with torch.enable_grad(), _Recorder(self.module) as recorder:
            result = cast("Tensor", self.run(**given))
        if recorder.blocked or has_own_backward(result):
            raise NoExperts("it computes gradients in its own way")
        return recorder.rows


def _more_than_operators(call: _Call) -> str:
    """Return what a loop leaves behind, or where its operators differ; "" where it does not run without data."""
    try:
        for training in (False, True):
            if reason := side_effect(call.module.train(training), call.run):
                return reason
        trained = call.traced(MODES[0])
        plain = [call.in_mode(False).traced(mode) for mode in MODES]
    except Exception:  # noqa: BLE001 - foreign code without data raises anything
        return ""
    if trained != plain[0]:
        return "it computes something else in training mode"
    return "it computes something else in inference mode or with autocast" if plain[1:] != plain[:1] * 2 else ""


def _circumstance(call: _Call) -> str:
    """Return what a loop asks; where it does not run without data, no answer is known, and asking is the reason."""
    try:
        return dependence(call.module, call.run_with)
    except Exception:  # noqa: BLE001 - as above
        return question(call.module, call.run_with)


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


class _ByPosition(nn.Module):
    """A call with tensors by position, as export needs it."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.block, self._call = call.module, call

    def forward(self, *tensors: Tensor) -> Tensor:
        result = self._call.run(**dict(zip(self._call.named, tensors, strict=True)))
        if not isinstance(result, Tensor):
            raise NoExperts("it returns more than hidden states")
        return result


def _exported(call: _Call) -> ExportedProgram:
    """Export the call for any number of tokens. Raises NoExperts where the code depends on their number."""
    tensors = tuple(cast("Mapping[str, Tensor]", call.named).values())
    dynamic = tuple(dict.fromkeys(range(max(1, tensor.dim() - 1)), Dim.AUTO) for tensor in tensors)
    with silent_torch():
        program = torch.export.export(_ByPosition(call), tensors, dynamic_shapes=(dynamic,), strict=False)
    fixed = [node for node in _placeholders(program)[1] if isinstance(ops.shape_of(node)[0], int)]
    batched = len(tensors) == 1  # then there are equally many rows for each expert
    if fixed or violated_guard(program, call.count if batched else 1):
        raise NoExperts("its code depends on the number of tokens")
    return program


def _placeholders(program: ExportedProgram) -> tuple[dict[fx.Node, str], list[fx.Node]]:
    """Return the parameters' names by their nodes, and the nodes of the inputs in their order."""
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    if signature.inputs_to_lifted_tensor_constants:
        raise NoExperts("it computes with a tensor that it creates itself")
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    names = {node: stored[node.name].removeprefix("block.") for node in nodes if node.name in stored}
    return names, [node for node in nodes if node.name not in stored]


def _require_same_shape(program: ExportedProgram, hidden: fx.Node) -> None:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    (result,) = output.all_input_nodes
    if list(map(traced_size, ops.shape_of(result))) != list(map(traced_size, ops.shape_of(hidden))):
        raise NoExperts("its result has another shape than its hidden states")


class _Recorder(Trace):
    """A trace that also records whether numbers were computed without gradients."""

    blocked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.blocked |= not torch.is_grad_enabled() and isinstance(result, Tensor) and result.is_floating_point()
        return result
