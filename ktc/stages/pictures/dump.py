"""The serialisable form of one stage of a compilation: the contents of `OUT/graph/<stage>.json`, read by all drawings.

Input: a block's fx graph with the `node.meta` keys of the graph contract, or the JSON text of an earlier dump.
Output: frozen values, and JSON that is equal for equal graphs. Refused: text that is not a dump of this schema
(`InputRefused`, with the position inside the JSON).
"""

from __future__ import annotations

import inspect
import json
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import Undecodable, decode, read_json, schema_fault
from ktc.foundation.regular_files import read_regular
from ktc.model.experts.private_api import schema_of

if TYPE_CHECKING:
    from torch import fx, nn

SCHEMA = 1
Stage = Literal["captured", "matched", "planned", "rewritten"]

_WANTED = "give a graph/*.json file of a compiled model"


@dataclass(frozen=True, slots=True)
class NodeDump:
    """One value of a block. `shape` is None for a value other than a single tensor; empty strings mean unknown.

    `inputs` are node names in argument order; `attributes` are the other arguments that differ from their defaults.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    shape: tuple[int | str, ...] | None = None
    dtype: str = ""
    device: str = ""
    fqn: str = ""
    rule: str = ""
    span: str = ""


@dataclass(frozen=True, slots=True)
class BlockDump:
    """One distinct block graph: `sites` are the FQNs of the modules that share it, `layers` their layer numbers."""

    key: str
    class_name: str
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    nodes: tuple[NodeDump, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleDump:
    """One module of the tree. `parameters` and `bytes` count its own tensors, not those of its children."""

    fqn: str
    class_name: str
    parameters: int
    bytes: int
    device: str = ""
    rule: str = ""


@dataclass(frozen=True, slots=True)
class MatchDump:
    """One match: `captures` maps each name of the pattern to the node (by its name in the block's graph)."""

    rule: str
    pattern: str
    site: str
    captures: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ModelDump:
    """All data of one stage for the drawings."""

    schema: int
    stage: Stage
    model_type: str
    dtype: str
    modules: tuple[ModuleDump, ...]
    blocks: tuple[BlockDump, ...]
    matches: tuple[MatchDump, ...] = ()
    near_misses: tuple[str, ...] = ()

    def of_layer(self, layer: int | None) -> tuple[BlockDump, ...]:
        return tuple(block for block in self.blocks if layer is None or layer in block.layers)


def dump_block(
    graph_module: fx.GraphModule,
    key: str,
    class_name: str,
    sites: tuple[str, ...],
    layers: tuple[int, ...],
    notes: tuple[str, ...] = (),
) -> BlockDump:
    """Return the dump of one block graph, its nodes in execution order."""
    nodes = tuple(_dump_node(node, graph_module) for node in graph_module.graph.nodes)
    return BlockDump(key, class_name, sites, layers, nodes, notes)


def to_json(dump: ModelDump) -> str:
    """Return the dump as one JSON object; equal dumps have equal text."""
    return json.dumps(asdict(dump), indent=1, ensure_ascii=True) + "\n"


def from_json(text: str, path: str = "the graph dump") -> ModelDump:
    """Return the dump that `to_json` wrote. Raises `InputRefused` (I158 not a dump, I159 another schema)."""
    try:
        value = read_json(text)
        schema = cast("dict[str, Any]", value).get("schema") if isinstance(value, dict) else None
        if isinstance(schema, int) and (fault := schema_fault(schema, SCHEMA)):
            message = f"the graph dump `{path}` {fault}"
            raise _refused("I159", message, "compile the model again with this version of ktc")
        dump = decode(value, ModelDump)
    except ValueError as error:
        raise _refused("I158", f"`{path}` is not JSON: {error}", _WANTED) from error
    except Undecodable as error:
        raise _refused("I158", f"`{path}` is not a graph dump: {error}", _WANTED) from error
    _check_names(dump, path)
    return dump


def read_dump(path: Path) -> ModelDump:
    """Return the dump in a file. Raises `InputRefused` as `from_json` does, and for an unreadable file (I158)."""
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused("I158", f"cannot read `{path}`: {error}", _WANTED) from error
    return from_json(text, str(path))


def _dump_node(node: fx.Node, owner: fx.GraphModule) -> NodeDump:
    from ktc.model.graph.ops import operator as operator_of
    from ktc.model.graph.typed import dtype_name

    meta: dict[str, Any] = node.meta
    value = meta.get("val")
    dtype = getattr(value, "dtype", None)
    return NodeDump(
        name=node.name,
        op=operator_of(node),
        target=_target_path(node),
        inputs=tuple(_input_names(node)),
        attributes=(*_attributes(node), *_noted(meta), *_folded(node, owner)),
        shape=_shape(meta.get("shape", getattr(value, "shape", None))),
        dtype=str(meta.get("dtype") or ("" if dtype is None else dtype_name(dtype))),
        device=str(meta.get("device") or ""),
        fqn=str(meta.get("fqn") or (node.target if node.op in ("get_attr", "call_module") else "")),
        rule=str(meta.get("rule") or ""),
        span=str(meta.get("span") or ""),
    )


def _shape(shape: Any) -> tuple[int | str, ...] | None:
    if shape is None:
        return None
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def _target_path(node: fx.Node) -> str:
    if isinstance(node.target, str) or hasattr(node.target, "overloadpacket"):
        return str(node.target)
    name = getattr(node.target, "__qualname__", str(node.target))
    return f"{getattr(node.target, '__module__', '')}.{name}".lstrip(".")


def _input_names(node: fx.Node) -> Iterator[str]:
    for argument in (*node.args, *node.kwargs.values()):
        yield from (value.name for value in _nodes_in(argument))


def _nodes_in(argument: Any) -> Iterator[fx.Node]:
    from torch import fx

    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in cast("list[Any]", argument):
            yield from _nodes_in(item)


def _attributes(node: fx.Node) -> Iterator[tuple[str, str]]:
    """Yield the arguments that are not purely nodes, named by the operator's schema, without those at their default."""
    from torch import fx

    if node.op not in ("call_function", "call_method", "call_module"):
        return
    schema: list[Any] = list(getattr(schema_of(node.target), "arguments", ()))
    names: list[str] = [argument.name for argument in schema] or _parameters(node.target)
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(node.args)]
    for name, value in [*named, *node.kwargs.items()]:
        leaves = cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]
        whole_nodes = bool(leaves) and all(isinstance(leaf, fx.Node) for leaf in leaves)
        if not whole_nodes and not (name in defaults and defaults[name] == value):
            yield name, _argument_text(value)


def _noted(meta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a pass recorded of the operator that its new node replaces."""
    for name, value in dict(meta.get("attributes") or {}).items():
        yield str(name), str(value)
    for name in ("eps", "kernel"):
        if name in meta:
            yield name, str(meta[name])


def _parameters(target: object) -> list[str]:
    """Return the parameter names of a Python function or of `getitem`; none for other builtins and module names."""
    if target is operator.getitem:
        return ["value", "index"]
    return list(inspect.signature(target).parameters) if inspect.isfunction(target) else []


def _argument_text(value: Any) -> str:
    from torch import fx

    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument_text(item) for item in cast("list[Any]", value)) + "]"
    return str(value).removeprefix("torch.")


def _folded(node: fx.Node, owner: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """Yield the attributes of a folded region, a call of a submodule that is a graph itself."""
    from torch import fx

    from ktc.model.graph.ops import operator as operator_of

    if node.op != "call_module":
        return
    region = dict(cast("Iterator[tuple[str, nn.Module]]", owner.named_modules())).get(str(node.target))
    if isinstance(region, fx.GraphModule):
        calls = Counter(operator_of(n) for n in region.graph.nodes if n.op.startswith("call"))
        yield "folds", ", ".join(f"{count} {op}" if count > 1 else op for op, count in calls.items())


def _check_names(dump: ModelDump, path: str) -> None:
    """Refuse duplicate block keys and node names, since they can be neither drawn nor compared."""
    for place, names in [
        ("blocks", [block.key for block in dump.blocks]),
        *((f"block `{block.key}`", [node.name for node in block.nodes]) for block in dump.blocks),
    ]:
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise _refused("I158", f"`{path}` is not a graph dump: {place} has `{twice[0]}` twice", _WANTED)


def _refused(code: str, message: str, hint: str) -> InputRefused:
    return InputRefused(Diagnostic(code, message, hint=hint))
