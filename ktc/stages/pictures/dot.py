"""A stage as DOT text for Graphviz and compatible tools: a cluster for each block, rules as fill colours.

Input: a `ModelDump`, optionally one layer number. Output: DOT; no binary is run here. Strings of the model are quoted,
so that they cannot end a string or be parsed as a record, an escape or HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ktc.stages.pictures.dump import BlockDump, ModelDump
from ktc.stages.pictures.labels import (
    QUIET,
    captured_nodes,
    home_device,
    item_index,
    layers_text,
    printable,
    rule_text,
    type_text,
)
from ktc.stages.pictures.layout import caption, drawn_edges, drawn_nodes
from ktc.stages.pictures.measured import Measured, Verdict, of_block
from ktc.stages.pictures.svg import PALETTE, rule_colours, tooltip


def render_dot(dump: ModelDump, layer: int | None = None, measured: Sequence[Measured] = ()) -> str:
    """Return all blocks of the stage, or those of `layer`, as one digraph."""
    colours = rule_colours([dump])
    lines = [
        f"digraph {quoted(f'{dump.model_type} {dump.stage}')} {{",
        '  graph [fontname="Helvetica", labeljust=l, style=rounded, color="#d5d9e0"];',
        '  node [shape=box, style="rounded,filled", fillcolor=white, color="#aab3c2", fontname=Courier, fontsize=11];',
        '  edge [color="#98a2b3", arrowsize=0.6];',
    ]
    for i, block in enumerate(dump.of_layer(layer)):
        verdict = of_block(block, measured, layer)
        lines += [f"  subgraph cluster_{i} {{", *_cluster(i, block, dump, colours, verdict), "  }"]
    return "\n".join([*lines, "}"]) + "\n"


def quoted(*lines: str) -> str:
    """Return a DOT string of centred lines; each line is taken literally."""
    escaped = (printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def _cluster(
    i: int, block: BlockDump, dump: ModelDump, colours: Mapping[str, int], verdict: Verdict | None
) -> Iterator[str]:
    title = f"{block.key}: {block.class_name}  {layers_text(block)}".rstrip()
    yield f"    label={quoted(title, *(verdict.lines if verdict else ()))};"
    if verdict and verdict.red:
        yield '    color="#c01c28"; fontcolor="#c01c28"; penwidth=2;'
    nodes = {node.name: node for node in block.nodes}
    index = {node.name: f"b{i}_{n}" for n, node in enumerate(drawn_nodes(block))}
    bound = captured_nodes(block, dump)
    for name, identifier in index.items():
        node = nodes[name]
        rule = rule_text(node, home_device(block), span=False)
        head = node.name if node.op == "input" else f"{node.op} {item_index(node) or caption(node, nodes)}".rstrip()
        label = quoted(*(line for line in (head, type_text(node), rule) if line))
        facts = quoted(*tooltip(node, nodes, bound.get(name, ())).split("\n"))
        look = ""
        if node.rule:
            outline, fill, _, _ = PALETTE[colours[node.rule]]
            look = f', color="{outline}", fillcolor="{fill}"'
        elif node.op in QUIET:
            look = ', color="#eef0f4", fillcolor="#eef0f4", fontcolor="#667085"'
        yield f"    {identifier} [label={label}, tooltip={facts}{look}];"
    for source, target in drawn_edges(block):
        yield f"    {index[source]} -> {index[target]};"
