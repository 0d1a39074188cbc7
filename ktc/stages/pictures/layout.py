"""The layout of a block's picture: layers from the inputs at the top to the output at the bottom.

Input: a `BlockDump`. Output: a `Drawing` of boxes and routed edges in pixels, equal for equal blocks.
Weights and sizes get no box: a weight is named inside the box of the operator that reads it.

The layered layout is graphlay's (MIT or Apache-2.0, one prebuilt abi3 wheel of 1.5 MB without dependencies). It
supports box sizes, routes edges at right angles around boxes and is deterministic. Rejected: grandalf is GPL/EPL,
unmaintained and can put two boxes on one position; fast-sugiyama supports neither box sizes nor routes; pygraphviz
unpacks 110 MB of libraries.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.stages.pictures.dump import BlockDump, NodeDump
from ktc.stages.pictures.labels import (
    QUIET,
    WEIGHT,
    home_device,
    is_size,
    item_index,
    printable,
    rule_text,
    settings,
    type_text,
)

# A monospace character is 0.6 em wide in the usual fonts; the sizes here are those of picture.css.
_TITLE_WIDTH, _DETAIL_WIDTH = 13 * 0.602, 11 * 0.602
_PADDING = 12.0
_LINE = 16.0
_CAPTION = 22  # characters of settings next to an operator
_OPTIONS = {
    "direction": "topbottom",
    "spacing": {"layer_gap": 26.0, "node_gap": 24.0, "dummy_gap": 16.0, "port_gap": 14.0, "isolated_gap": 24.0},
}


@dataclass(frozen=True, slots=True)
class Box:
    """One node: its upper left corner and size, and its lines of text. `kind`: input, output, quiet or operator."""

    node: NodeDump
    kind: str
    title: str
    module: str
    details: tuple[str, ...]
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge: `points` from the border of `source` to that of `target`."""

    source: str
    target: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A block's layout, its upper left corner at 0, 0."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float


def drawn_nodes(block: BlockDump) -> tuple[NodeDump, ...]:
    """Return the nodes with a box: all but weights, sizes and unused inputs."""
    read = {name for node in block.nodes for name in node.inputs}
    return tuple(
        node
        for node in block.nodes
        if node.op not in WEIGHT and not is_size(node) and (node.op != "input" or node.name in read)
    )


def drawn_edges(block: BlockDump) -> tuple[tuple[str, str], ...]:
    """Return the (source, target) pairs between boxes, each once."""
    names = {node.name for node in drawn_nodes(block)}
    pairs = ((source, node.name) for node in drawn_nodes(block) for source in node.inputs if source in names)
    return tuple(dict.fromkeys(pairs))


def require_layout() -> None:
    """Raise HostLacks (H243) where the layout library, an extra of ktc, is not installed."""
    if importlib.util.find_spec("graphlay") is None:
        hint = "`pip install 'ktc[pictures]'`, or use `--format text`, `json` or `dot`"
        raise HostLacks(Diagnostic("H243", "an svg or html picture needs graphlay, which is not installed", hint=hint))


def place(block: BlockDump) -> Drawing:
    """Return the picture's geometry. An empty block has an empty drawing. Raises HostLacks (H243)."""
    require_layout()
    import graphlay

    nodes, home = {node.name: node for node in block.nodes}, home_device(block)
    boxes = [_box(node, nodes, home) for node in drawn_nodes(block)]
    pairs = drawn_edges(block)
    if not boxes:
        return Drawing((), (), 0.0, 0.0)
    graph = graphlay.Graph()
    index = {box.node.name: graph.node(width=box.width, height=box.height) for box in boxes}
    for source, target in pairs:
        graph.edge(index[source], index[target])
    laid = graphlay.layout(graph, options=_OPTIONS)
    left, top = laid.bounds["min"]["x"], laid.bounds["min"]["y"]
    moved = [
        replace(box, x=node["center"]["x"] - box.width / 2 - left, y=node["center"]["y"] - box.height / 2 - top)
        for box, node in zip(boxes, laid.nodes, strict=True)
    ]
    edges = [
        Edge(*pair, tuple((point["x"] - left, point["y"] - top) for point in edge["points"]))
        for pair, edge in zip(pairs, laid.edges, strict=True)
    ]
    return Drawing(tuple(moved), tuple(edges), laid.bounds["max"]["x"] - left, laid.bounds["max"]["y"] - top)


def module_name(node: NodeDump, nodes: dict[str, NodeDump]) -> str:
    """Return a node's module: its own FQN, otherwise that of the first weight it reads, without `.weight`."""
    weights = [nodes[name].fqn for name in node.inputs if name in nodes and nodes[name].op in WEIGHT]
    fqn = "" if node.fqn.startswith("folded.") else node.fqn
    return (fqn or next(iter(weights), "")).removesuffix(".weight")


def caption(node: NodeDump, nodes: dict[str, NodeDump]) -> str:
    """Return the text next to the operator: the module, otherwise the settings that fit on the line."""
    if module := module_name(node, nodes):
        return printable(module, 30)
    shown = ""
    for setting in settings(node):
        longer = f"{shown}, {setting}" if shown else setting
        if len(longer) <= _CAPTION and not setting.startswith(("dtype=", "sorted=")):
            shown = longer
    return shown


def _box(node: NodeDump, nodes: dict[str, NodeDump], home: str) -> Box:
    kind = node.op if node.op in ("input", "output") else "quiet" if node.op in QUIET and not node.rule else "operator"
    kind_of_value = printable(type_text(node), 40)
    if kind == "quiet":
        weight = "" if node.rule else module_name(node, nodes)
        title = f"[{index}]" if (index := item_index(node)) else printable(f"{node.op} {weight}".rstrip(), 40)
        module, details = printable(type_text(node), 34), ()
    elif kind in ("input", "output"):
        title, module, details = printable(node.name, 32), kind_of_value, ()
    else:
        title, module = printable(node.op, 24), caption(node, nodes)
        rule = rule_text(node, home, span=False)
        details = tuple(line for line in (kind_of_value, printable(rule, 40)) if line)
    module_width = _DETAIL_WIDTH if kind == "quiet" else _TITLE_WIDTH
    first = len(title) * _TITLE_WIDTH + (len(module) * module_width + _TITLE_WIDTH if module else 0.0)
    width = max([56.0, first, *(len(line) * _DETAIL_WIDTH for line in details)]) + 2 * _PADDING
    height = (10.0 if kind == "operator" else 8.0) + _LINE * (1 + len(details))
    return Box(node, kind, title, module, details, 0.0, 0.0, round(width), height)
