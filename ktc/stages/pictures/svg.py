"""A stage as one SVG: each block a frame with its nodes inside, rewritten nodes in the colour of their rule, a legend.

Input: a `ModelDump`, optionally one layer number. Output: SVG text that needs no network, script or external font.
Each node carries its type, device, FQN and rule as a tooltip. Every string of the model is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ktc.foundation import resources
from ktc.stages.pictures.dump import BlockDump, ModelDump, NodeDump
from ktc.stages.pictures.labels import (
    call_text,
    captured_nodes,
    collapse,
    home_device,
    layers_text,
    printable,
    rule_names,
    type_text,
)
from ktc.stages.pictures.layout import Box, Drawing, Edge, place
from ktc.stages.pictures.measured import Measured, Verdict, of_block, of_model

# Outline and fill on a light ground, then on a dark ground: eight hues that colour-blind readers can distinguish.
PALETTE = (
    ("#0067a5", "#d9ecfa", "#5cb3ec", "#123a57"),
    ("#c2570c", "#fdeadb", "#f59a57", "#52300f"),
    ("#00805c", "#d8f3ea", "#46c79f", "#0d4335"),
    ("#8a3ea8", "#f2e4f8", "#c78be0", "#402351"),
    ("#9a7400", "#fbf1cf", "#e0bb4a", "#463808"),
    ("#b3224f", "#fbe0e8", "#f0809f", "#511829"),
    ("#3f51b5", "#e3e7fb", "#93a1f0", "#262f5c"),
    ("#4d6b1e", "#eaf3d8", "#a3c968", "#2b3b13"),
)
_MARGIN, _HEADING, _GAP, _CORNER, _LINE = 24.0, 52.0, 32.0, 7.0, 18.0
_CHARACTER = 9.1


def render_svg(dump: ModelDump, layer: int | None = None, measured: Sequence[Measured] = ()) -> str:
    """Return all blocks of the stage side by side, or those of `layer`, as a separate document."""
    blocks = dump.of_layer(layer)
    colours = rule_colours([dump])
    drawings = [place(block) for block in blocks]
    verdicts = [of_block(block, measured, layer) for block in blocks]
    widths = [_frame_width(*sized) for sized in zip(blocks, drawings, verdicts, strict=True)]
    legend = [rule for rule in colours if any(node.rule == rule for block in blocks for node in block.nodes)]
    legend_width = sum(len(printable(rule, 40)) * _CHARACTER + 40 for rule in legend)
    width = max(sum(widths) + _GAP * (len(blocks) - 1), legend_width, 400.0) + 2 * _MARGIN
    whole = of_model(measured)
    top = _MARGIN + 28 + (36 if legend else 12) + (_LINE if whole else 0)
    heading = _HEADING + (_LINE if any(verdicts) else 0)
    height = top + max((drawing.height for drawing in drawings), default=0.0) + heading + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" {_extent(0, width, height)}>',
        f"<style>{style(len(colours))}</style>",
        f'<rect class="ground" width="{width:g}" height="{height:g}"/>',
        _text(_MARGIN, _MARGIN + 14, "heading", f"{printable(dump.model_type, 60)}, {dump.stage}"),
        *([_text(_MARGIN, _MARGIN + 14 + _LINE, _look(whole), whole.lines[0])] if whole else ()),
        *_legend(legend, colours, _MARGIN + 40 + (_LINE if whole else 0)),
    ]
    x = _MARGIN
    for block, drawing, verdict, frame_width in zip(blocks, drawings, verdicts, widths, strict=True):
        parts += _framed(block, drawing, dump, colours, (x, top, frame_width), verdict)
        x += frame_width + _GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def block_svg(block: BlockDump, dump: ModelDump, colours: Mapping[str, int]) -> str:
    """Return one block without frame and style sheet, for a page that includes `style` once."""
    drawing = place(block)
    width, height = drawing.width + 2 * _MARGIN, drawing.height + 2 * _MARGIN
    content = _drawn(block, drawing, dump, colours, keyboard=True)
    return (
        f'<svg class="picture" {_extent(-_MARGIN, width, height)} role="group" '
        f'aria-label="{escape(printable(block.key, 80))}">\n{content}\n</svg>'
    )


def rule_colours(dumps: Iterable[ModelDump]) -> dict[str, int]:
    """Return the number of the colour class `rule-N` for each rule; surplus rules reuse the colours cyclically."""
    return {rule: i % len(PALETTE) for i, rule in enumerate(rule_names(dumps))}


def style(num_rules: int) -> str:
    """Return the style sheet of all pictures, with the colours of the first `num_rules` rules."""
    sheet = (resources.templates() / "graph_picture.css").read_text(encoding="utf-8")
    light = [_rule_style(i, PALETTE[i][0], PALETTE[i][1]) for i in range(min(num_rules, len(PALETTE)))]
    dark = [_rule_style(i, PALETTE[i][2], PALETTE[i][3]) for i in range(min(num_rules, len(PALETTE)))]
    return "\n".join([sheet, *light, "@media (prefers-color-scheme: dark) {", *dark, "}"])


def _rule_style(i: int, outline: str, fill: str) -> str:
    return (
        f".rule-{i} .box {{ fill: {fill}; stroke: {outline}; stroke-width: 1.6; }} "
        f".rule-{i} .detail {{ fill: {outline}; }} .mark.bound-{i} {{ fill: {outline}; }} "
        f".dot.rule-{i} {{ background: {outline}; }} .made.rule-{i} {{ background: {fill}; color: {outline}; }}"
    )


def _framed(
    block: BlockDump, drawing: Drawing, dump: ModelDump, colours: Mapping[str, int],
    place: tuple[float, float, float], verdict: Verdict | None,
) -> list[str]:  # fmt: skip
    x, y, width = place
    heading = _HEADING + (_LINE if verdict else 0)
    height = drawing.height + heading + _MARGIN
    look = " failed" if verdict is not None and verdict.red else ""
    title = f"{printable(block.key, 60)}: {printable(block.class_name, 60)}"
    return [
        f'<g transform="translate({x:g} {y:g})">',
        f'<rect class="frame{look}" width="{width:g}" height="{height:g}" rx="10"/>',
        _text(16, 24, "heading", title),
        _text(16, 41, "aside", _where(block)),
        *([_text(16, 58, _look(verdict), _summary(verdict))] if verdict else ()),
        f'<g transform="translate({(width - drawing.width) / 2:g} {heading:g})">',
        _drawn(block, drawing, dump, colours, keyboard=False),
        "</g></g>",
    ]


def _look(verdict: Verdict) -> str:
    return "aside failed" if verdict.red else "aside"


def _summary(verdict: Verdict) -> str:
    """Return the last line: why a block fails, or its error."""
    return printable(verdict.lines[-1], 110)


def _where(block: BlockDump) -> str:
    sites = ", ".join(collapse(block.sites))
    home = home_device(block)
    parts = (layers_text(block), sites, f"on {home}" if home else "")
    return printable("  ".join(filter(None, parts)), 110)


def _frame_width(block: BlockDump, drawing: Drawing, verdict: Verdict | None) -> float:
    title = len(f"{printable(block.key, 60)}: {printable(block.class_name, 60)}") * _CHARACTER
    asides = (_where(block), _summary(verdict) if verdict else "")
    return max(drawing.width, title, *(len(aside) * 7.3 for aside in asides)) + 2 * 16


def _drawn(block: BlockDump, drawing: Drawing, dump: ModelDump, colours: Mapping[str, int], *, keyboard: bool) -> str:
    nodes = {node.name: node for node in block.nodes}
    bound = captured_nodes(block, dump)
    edges = [_edge(edge) for edge in drawing.edges]
    boxes = [_box(box, nodes, bound.get(box.node.name, ()), colours, keyboard) for box in drawing.boxes]
    return "\n".join([*edges, *boxes])


def _box(
    box: Box,
    nodes: dict[str, NodeDump],
    bound: Sequence[tuple[str, str]],
    colours: Mapping[str, int],
    keyboard: bool,
) -> str:
    node = box.node
    rule = f" rule-{colours[node.rule]}" if node.rule in colours else ""
    focus = f' tabindex="0" role="button" data-node="{escape(printable(node.name, 4000))}"' if keyboard else ""
    radius = 6.0 if box.kind == "operator" else box.height / 2
    title = f'<tspan class="title">{escape(box.title)}</tspan>'
    if box.module:
        title += f' <tspan class="module">{escape(box.module)}</tspan>'
    middle = box.width / 2
    lines = [f'<text x="{middle:g}" y="{17 if box.kind == "operator" else 16}" text-anchor="middle">{title}</text>']
    for i, detail in enumerate(box.details):
        lines.append(
            f'<text class="detail" x="{middle:g}" y="{33 + 16 * i}" text-anchor="middle">{escape(detail)}</text>'
        )
    marks = [
        f'<circle class="mark bound-{colours[name]}" cx="{box.width - 9 - 11 * i:g}" cy="0" r="5"/>'
        for i, name in enumerate(dict.fromkeys(rule for rule, _ in bound))
    ]
    return (
        f'<g class="node {box.kind}{rule}" transform="translate({box.x:g} {box.y:g})"{focus}>'
        f"<title>{escape(tooltip(node, nodes, bound))}</title>"
        f'<rect class="box" width="{box.width:g}" height="{box.height:g}" rx="{radius:g}"/>'
        f"{''.join(lines)}{''.join(marks)}</g>"
    )


def tooltip(node: NodeDump, nodes: dict[str, NodeDump], bound: Sequence[tuple[str, str]]) -> str:
    """Return the facts of a node, one per line."""
    facts = [
        ("", f"{printable(node.name, 120)} = {call_text(node, nodes)}"),
        ("type", type_text(node)),
        ("folds", dict(node.attributes).get("folds", "")),
        ("device", node.device),
        ("fqn", node.fqn),
        ("rule", node.rule),
        ("from", node.span),
        *(("bound", f"{name} of {rule}") for rule, name in bound),
    ]
    return "\n".join(f"{word}: {printable(value)}" if word else value for word, value in facts if value)


def _edge(edge: Edge) -> str:
    ends = f' data-source="{escape(printable(edge.source, 4000))}" data-target="{escape(printable(edge.target, 4000))}"'
    line, tip = _path(edge.points), _tip(edge.points)
    return f'<g class="wire"{ends}><path class="edge" d="{line}"/><path class="tip" d="{tip}"/></g>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return straight segments with rounded corners."""
    commands = [f"M{points[0][0]:g} {points[0][1]:g}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        (ax, ay), (bx, by) = _towards(corner, before), _towards(corner, after)
        commands.append(f"L{ax:g} {ay:g}Q{corner[0]:g} {corner[1]:g} {bx:g} {by:g}")
    return "".join([*commands, f"L{points[-1][0]:g} {points[-1][1]:g}"])


def _towards(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Return the point at distance `_CORNER` from `start` towards `end`, at most half the distance."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx * dx + dy * dy) ** 0.5
    share = min(_CORNER / length, 0.5) if length else 0.0
    return round(start[0] + dx * share, 2), round(start[1] + dy * share, 2)


def _tip(points: Sequence[tuple[float, float]]) -> str:
    """Return an arrow head at the last point, along the last segment."""
    (x0, y0), (x1, y1) = points[-2], points[-1]
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    left = f"{x1 - 7 * dx - 3.5 * dy:.2f} {y1 - 7 * dy + 3.5 * dx:.2f}"
    right = f"{x1 - 7 * dx + 3.5 * dy:.2f} {y1 - 7 * dy - 3.5 * dx:.2f}"
    return f"M{x1:g} {y1:g}L{left}L{right}Z"


def _legend(rules: Sequence[str], colours: Mapping[str, int], y: float) -> list[str]:
    parts: list[str] = []
    x = _MARGIN
    for rule in rules:
        name = printable(rule, 40)
        parts.append(
            f'<g class="rule-{colours[rule]}" transform="translate({x:g} {y:g})">'
            f'<rect class="box" width="18" height="14" rx="3"/>{_text(25, 12, "module", name)}</g>'
        )
        x += len(name) * _CHARACTER + 40
    return parts


def _extent(corner: float, width: float, height: float) -> str:
    return f'viewBox="{corner:g} {corner:g} {width:g} {height:g}" width="{width:g}" height="{height:g}"'


def _text(x: float, y: float, css: str, content: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{css}">{escape(content)}</text>'
