"""The bindings during the match of a pattern: frozen values, so that backtracking discards them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.fold import tensor_inputs
from ktc.model.graph.typed import input_of
from ktc.stages.match.types import Binding, NodeRef, NodeSet, SubMatch


@dataclass(frozen=True, slots=True)
class Value:
    """One result of a node, seen through layout operators, or a scalar."""

    node: fx.Node | None
    index: int = 0
    scalar: float = 0.0


@dataclass(frozen=True, slots=True)
class Several:
    """The values that `every` found, in the order of the graph."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class State:
    """The current bindings: values by name, members of sub-patterns not yet entered, and the nodes used."""

    names: Mapping[str, Value | Several | Sub]
    pending: Mapping[tuple[str, str], Value]
    nodes: frozenset[fx.Node]

    def bind(self, name: str, value: Value | Several | Sub) -> State:
        return replace(self, names={**self.names, name: value})


@dataclass(frozen=True, slots=True)
class Sub:
    """A sub-pattern that was entered: its name and its bindings."""

    pattern: str
    state: State


EMPTY = State({}, {}, frozenset())


def look(operand: ops.Operand, passed: set[fx.Node] | None = None) -> Value:
    """Return the value behind layout operators, casts and `getitem`; add the nodes passed to `passed`."""
    if not isinstance(operand, fx.Node):
        return Value(None, 0, float(operand))
    node, index = operand, 0
    while True:
        name = ops.operator(node)
        if name == "getitem":
            index = _result_index(node)
        elif name not in ops.TRANSPARENT or index != 0:
            return Value(node, index)
        if passed is not None:
            passed.add(node)
        node = input_of(node, 0)


def sources_of(node: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the nearest linear layers, attention cores and experts that flow into `node`, and the nodes passed.

    A node of these kinds is its own source.
    """
    sources, passed, todo = dict[fx.Node, None](), set[fx.Node](), [node]
    while todo:
        current = todo.pop()
        if ops.operator(current) in ops.SEMANTIC:
            sources[current] = None
        elif current not in passed and current.op not in ("placeholder", "get_attr"):
            passed.add(current)
            todo += tensor_inputs(current)
    return list(sources), passed


def upstream_of(node: fx.Node) -> list[fx.Node]:
    """Return `node` and all nodes that flow into it, near and far, in the order of the graph."""
    reached, todo = set[fx.Node](), [node]
    while todo:
        current = todo.pop()
        if current not in reached:
            reached.add(current)
            todo += tensor_inputs(current)
    return sorted(reached)


def _result_index(getitem: fx.Node) -> int:
    index = getitem.args[1]
    assert isinstance(index, int), f"`{getitem.name}` does not take a single result"
    return index


def settle(state: State, name: str, sub: Sub) -> Iterator[State]:
    """Compare the members of `name` that were met before its first output; yield nothing if one differs."""
    waiting = {member: value for (owner, member), value in state.pending.items() if owner == name}
    if all(sub.state.names.get(member) == value for member, value in waiting.items()):
        yield replace(state, pending={key: v for key, v in state.pending.items() if key[0] != name})


def freeze(sub: Sub) -> SubMatch:
    """Return the bindings of a sub-pattern, by the names of nodes."""
    frozen: dict[str, Binding] = {}
    for name, value in sub.state.names.items():
        if isinstance(value, Sub):
            frozen[name] = freeze(value)
        elif isinstance(value, Several):
            frozen[name] = NodeSet(tuple(one.node.name for one in value.values if one.node is not None))
        else:
            frozen[name] = value.scalar if value.node is None else NodeRef(value.node.name, value.index)
    return SubMatch(sub.pattern, frozen)
