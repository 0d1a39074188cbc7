"""Recurrent layers: the projections around a core that stays opaque, as a graph of a few nodes.

Input: a block and a call of it on meta tensors. Output: a graph of the block's linear layers and causal convolutions,
of one `recurrence` for all code that joins positions, of the norm behind it and of the projection out. None for a block
without that structure. Its nodes show what flows where, and compute nothing: the block keeps its own code.

The structure is found by running the code once, with each tensor's sources. A source is the input, a linear layer, a
convolution, a norm or the core. An operator joins positions if it slices or pads them, sums along them, or pairs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from ktc.model.experts.private_api import TorchDispatchMode, schema_of, tree_iter
from ktc.model.graph import ops
from ktc.model.graph.typed import attach_tensor, named_modules, nodes_of
from ktc.stages.capture.export import BATCH, SEQUENCE, main_output
from ktc.stages.capture.forwards import replaced_forwards
from ktc.stages.capture.normal_form import normalise

_ALONG = frozenset({
    "constant_pad_nd", "slice", "select", "unbind", "split", "split_with_sizes", "flip",
})  # fmt: skip
_SUMS = frozenset({"sum", "mean", "amax", "cumsum", "cumprod"})
_CONVOLUTIONS = frozenset({"convolution", "conv1d"})
_LETTERS = {BATCH: "b", SEQUENCE: "s"}
_Kind = Literal["input", "linear", "conv1d", "norm", "recurrence"]


@dataclass(eq=False, slots=True)
class _Source:
    """A value that others are computed from. `fqn` is its module, `given` whether it takes the block's input itself."""

    kind: _Kind
    fqn: str = ""
    behind: frozenset[_Source] = frozenset()
    given: bool = False
    value: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def upstream(self) -> set[_Source]:
        """Return the sources that flow into this one, near and far."""
        seen, waiting = set[_Source](), list(self.behind)
        while waiting:
            source = waiting.pop()
            if source not in seen:
                seen.add(source)
                waiting += source.behind
        return seen


def recurrent_graph(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule | None:
    """Return the graph of a recurrent layer in normal form, None for another block. The block runs on meta tensors."""
    linears = {name: module for name, module in named_modules(block) if isinstance(module, nn.Linear)}
    if len(linears) < 2 or "" in linears:
        return None
    flow = _Flow(block, (args, dict(kwargs)))
    norms = {name: block.get_submodule(name) for name in _norms(block)}
    watched = [(module, flow.recording("linear", name, module)) for name, module in linears.items()]
    watched += [(module, flow.recording("norm", name, module)) for name, module in norms.items()]
    with replaced_forwards(watched), torch.no_grad(), flow:
        result = block(*args, **kwargs)
    layer = None if flow.attends else _Layer.of(flow, main_output(result, flow.hidden))
    return None if layer is None else _named_sizes(normalise(layer.graph(type(block).__name__)))


def _norms(block: nn.Module) -> Iterator[str]:
    """Yield the modules without children that hold vectors alone: norms, with or without a gate."""
    for name, module in named_modules(block):
        parameters = list(module.parameters(recurse=False))
        vectors = bool(parameters) and all(parameter.dim() == 1 for parameter in parameters)
        if name and vectors and not any(True for _ in module.children()):
            yield name


def _named_sizes(graph: fx.GraphModule) -> fx.GraphModule:
    """Write the letters of other graphs for batch and positions into the shapes of values."""
    for node in nodes_of(graph):
        if node.op != "get_attr" and "shape" in node.meta:
            node.meta["shape"] = tuple(_LETTERS.get(size, size) for size in node.meta["shape"])
    return graph


class _Flow(TorchDispatchMode):
    """The sources of every tensor. A write into a view reaches all tensors of its storage."""

    def __init__(self, block: nn.Module, call: object) -> None:
        super().__init__()
        self.attends = False  # experts or a softmax run in the block
        self.core = _Source("recurrence")
        self.order: list[_Source] = []
        self._weights = {tensor.untyped_storage(): (name, tensor) for name, tensor in block.named_parameters()}
        self._of: dict[int, tuple[Tensor, frozenset[_Source]]] = {}  # the tensors live on, so that ids stay theirs
        self._written: dict[torch.UntypedStorage, frozenset[_Source]] = {}
        self.hidden = next((t for t in _tensors(call) if t.is_floating_point()), None)
        self.input = _Source("input", value=self.hidden)
        if self.hidden is not None:
            self._of[id(self.hidden)] = self.hidden, frozenset({self.input})

    def sources(self, values: object) -> frozenset[_Source]:
        """Return the sources of all tensors in a value."""
        behind = set[_Source]()
        for tensor in _tensors(values):
            behind |= self._of[id(tensor)][1] if id(tensor) in self._of else frozenset()
            behind |= self._written.get(tensor.untyped_storage(), frozenset())
        return frozenset(behind)

    def recording(self, kind: _Kind, name: str, module: nn.Module) -> Callable[..., Any]:
        """Return a `forward` of a module whose result is a source."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if isinstance(result, Tensor):
                source = _Source(kind, name, self.sources((args, kwargs)), any(a is self.hidden for a in args), result)
                self._becomes(result, replace(source, tensors=dict(module.named_parameters(recurse=False))))
            return result

        return forward

    def _becomes(self, result: Tensor, source: _Source) -> None:
        self.order.append(source)
        self._of[id(result)] = result, frozenset({source})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        behind = self.sources((args, kwargs))
        result = func(*args, **kwargs)
        name = _name(func)
        self.attends |= func.namespace == "ktc_capture" or "softmax" in name
        convolves = name in _CONVOLUTIONS and args[1].shape[-1] > 1
        if convolves and isinstance(result, Tensor) and (tensors := self._parameters(args[1:3])):
            fqn = next(iter(tensors)).rpartition(".")[0]
            by_leaf = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
            self._becomes(result, _Source("conv1d", fqn, behind, value=result, tensors=by_leaf))
            return result
        if behind and (convolves or _joins_positions(name, args, kwargs, result)):
            self.core.behind |= behind - {self.core}
            behind = frozenset({self.core})
        for tensor in _tensors(result):
            self._of[id(tensor)] = tensor, behind
        for tensor in _written(func, args):
            storage = tensor.untyped_storage()
            self._written[storage] = self._written.get(storage, frozenset()) | behind
        return result

    def _parameters(self, given: Sequence[object]) -> dict[str, Tensor]:
        """Return the block's parameters of which arguments are views, by name; none if the first is not one."""
        known = [self._weights.get(tensor.untyped_storage()) for tensor in _tensors(given)]
        return dict(pair for pair in known if pair is not None) if known and known[0] is not None else {}


def _name(func: Any) -> str:
    """Return the name of an operator without its library and overload."""
    return str(func.name()).partition("::")[2].partition(".")[0]


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor)]


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the arguments that an operator changes."""
    for declared, given in zip(schema_of(func).arguments, args, strict=False):
        if declared.alias_info is not None and declared.alias_info.is_write and isinstance(given, Tensor):
            yield given


def _joins_positions(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> bool:
    """Return whether an operator works along the positions, or pairs them."""
    given, made = _tensors((args, kwargs)), _tensors(result)
    if name in _ALONG:
        before = list(given[0].shape)
        return SEQUENCE in before and any(
            list(tensor.shape).count(SEQUENCE) < before.count(SEQUENCE) for tensor in made
        )
    if name in _SUMS:
        dims: object = args[1] if len(args) > 1 else kwargs.get("dim")
        along = cast("Sequence[object]", dims) if isinstance(dims, list | tuple) else (dims,)
        return any(isinstance(dim, int) and given[0].shape[dim] == SEQUENCE for dim in along)
    pairs = any(list(tensor.shape).count(SEQUENCE) > 1 for tensor in made)
    return pairs and not any(list(tensor.shape).count(SEQUENCE) > 1 for tensor in given)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A recurrent layer: its linear layers and convolutions in the order of their calls, its norms behind the core."""

    input: _Source
    before: tuple[_Source, ...]
    norms: tuple[_Source, ...]
    out: _Source

    @staticmethod
    def of(flow: _Flow, result: Tensor) -> _Layer | None:
        """Return the layer whose result is one projection of joined positions, None for another block."""
        last = flow.sources(result)
        out = next(iter(last)) if len(last) == 1 else flow.input
        called = [source.fqn for source in flow.order if source.kind == "linear"]
        if out.kind != "linear" or len(called) != len(set(called)):
            return None
        upstream = out.upstream()
        behind = [source for source in flow.order if source in upstream]
        before = tuple(source for source in behind if source.kind in ("linear", "conv1d"))
        projections = [source for source in before if source.kind == "linear"]
        core = {flow.core} if flow.core in upstream else {source for source in before if source.kind == "conv1d"}
        if not core or not projections or any(flow.core in source.upstream() for source in projections):
            return None
        norms = tuple(source for source in behind if source.kind == "norm" and core & source.upstream())
        return _Layer(flow.input, before, norms, out)

    def graph(self, name: str) -> fx.GraphModule:
        """Return the layer as a graph of class `name`. Gates of the core's result are operands of the core."""
        drawn = _Drawing()
        drawn.nodes[self.input] = drawn.graph.placeholder("hidden_states")
        drawn.nodes[self.input].meta["val"] = self.input.value
        for source in self.before:
            drawn.parameterised(source, drawn.given(source))
        kinds = [[drawn.nodes[s] for s in self.before if s.kind == kind] for kind in ("linear", "conv1d")]
        operands = tuple(drawn.opaque(ops.computed, nodes) for nodes in kinds if nodes)
        value = drawn.opaque(ops.recurrence, operands)
        value.meta["val"] = next((source.value for source in self.norms), None)
        for source in self.norms:
            value = drawn.opaque(ops.norm, (value,))
            value.meta |= {"val": source.value, "fqn": source.fqn}
        drawn.graph.output(drawn.parameterised(self.out, value))
        return fx.GraphModule(drawn.root, drawn.graph, class_name=name)


class _Drawing:
    """A graph in the making, with the node of each source."""

    def __init__(self) -> None:
        self.root, self.graph, self.nodes = nn.Module(), fx.Graph(), dict[_Source, fx.Node]()

    def given(self, source: _Source) -> fx.Node:
        """Return what a linear layer or a convolution takes: the input, or code of the block on nearer sources."""
        if source.given and len(source.behind) == 1:
            return next(self.nodes[behind] for behind in source.behind)
        seen, waiting, near = set[_Source](), list(source.behind), dict[fx.Node, None]()
        while waiting:
            behind = waiting.pop()
            if behind in self.nodes:
                near[self.nodes[behind]] = None
            elif behind not in seen:
                seen.add(behind)
                waiting += behind.behind
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        return self.opaque(ops.computed, sorted(near, key=order.__getitem__))

    def opaque(self, function: Callable[..., Any], operands: Sequence[fx.Node]) -> fx.Node:
        """Return a node of code that the graph does not show; it has the size of its first operand."""
        node = self.graph.call_function(function, tuple(operands))
        node.meta["val"] = operands[0].meta["val"]
        return node

    def parameterised(self, source: _Source, given: fx.Node) -> fx.Node:
        """Return the node of a linear layer or a convolution, with its parameters."""
        weights: list[fx.Node | None] = []
        for leaf in ("weight", "bias"):
            tensor = source.tensors.get(leaf)
            if tensor is None:
                weights.append(None)
                continue
            attach_tensor(self.root, f"{source.fqn}.{leaf}", tensor)
            weights.append(weight := self.graph.get_attr(f"{source.fqn}.{leaf}"))
            weight.meta["val"] = tensor
        target = torch.ops.aten.linear.default if source.kind == "linear" else torch.ops.aten.conv1d.default
        node = self.graph.call_function(target, (given, *weights))
        node.meta |= {"val": source.value, "fqn": source.fqn}
        self.nodes[source] = node
        return node
