"""All stages of a compilation as one HTML page: stages, blocks, modules, the picture of a block and its details.

Input: the `ModelDump`s of one model, in the order of the pipeline. Output: one self-contained file; its policy forbids
any network access. Without scripts the page shows the same content sequentially. Strings of the model are escaped by
the template; the embedded JSON cannot end its element.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ktc.foundation import resources
from ktc.foundation.module_paths import is_inside
from ktc.stages.pictures.dump import BlockDump, ModelDump
from ktc.stages.pictures.labels import captured_nodes, collapse, home_device, layers_text, printable, quantity
from ktc.stages.pictures.layout import drawn_nodes
from ktc.stages.pictures.measured import Measured, of_block, of_model
from ktc.stages.pictures.module_tree import TreeLine, module_tree
from ktc.stages.pictures.overview import overview
from ktc.stages.pictures.svg import block_svg, rule_colours, style
from ktc.stages.pictures.text import render_block

_SITE = re.compile(r" matched in (\S+), then at ")  # as a near miss names its block


def render_html(dumps: Sequence[ModelDump], layer: int | None = None, measured: Sequence[Measured] = ()) -> str:
    """Return the page of one model's stages, with `layer` only that layer's blocks. `dumps` must not be empty.

    The last stage shows what was `measured`.
    """
    assert dumps, "a page needs at least one stage"
    colours = rule_colours(dumps)
    environment = Environment(
        loader=FileSystemLoader(resources.templates()),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    page = environment.get_template("graph.html.j2").render(
        title=printable(dumps[-1].model_type, 80),
        subtitle=f"{printable(dumps[-1].dtype, 20)}, {_model_size(dumps[-1])}".removesuffix(", "),
        stages=[_stage(dump, layer, colours, measured if dump is dumps[-1] else ()) for dump in dumps],
        rules=[{"name": printable(rule, 80), "colour": i, "span": _span(rule, dumps)} for rule, i in colours.items()],
        data=[_data(dump, layer, colours) for dump in dumps],
        picture_style=Markup(style(len(colours))),
    )
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def _stage(
    dump: ModelDump, layer: int | None, colours: Mapping[str, int], measured: Sequence[Measured]
) -> dict[str, Any]:
    blocks = dump.of_layer(layer)
    return {
        "name": dump.stage,
        "verdict": of_model(measured),
        "blocks": [{**_block(b, dump, colours), "verdict": of_block(b, measured, layer)} for b in blocks],
        "overview": overview(dump, layer),
        **_near_misses(dump),
        "matches": _matches(dump, colours),
        "tree": [_tree_line(line, blocks, colours) for line in module_tree(dump.modules)],
    }


def _near_misses(dump: ModelDump) -> dict[str, list[str]]:
    """Return the near misses, those in blocks that another pattern matched apart."""
    apart: dict[str, list[str]] = {"near_misses": [], "matched_misses": []}
    for reason in dump.near_misses:
        site = _SITE.search(reason)
        matched = site is not None and any(is_inside(match.site, site[1]) for match in dump.matches)
        apart["matched_misses" if matched else "near_misses"].append(printable(reason, 400))
    return apart


def _block(block: BlockDump, dump: ModelDump, colours: Mapping[str, int]) -> dict[str, Any]:
    rules = dict.fromkeys(node.rule for node in block.nodes if node.rule)
    return {
        "key": printable(block.key, 80),
        "class_name": printable(block.class_name, 80),
        "layers": layers_text(block),
        "where": printable(", ".join(collapse(block.sites)), 160),
        "device": home_device(block),
        "num_nodes": len(drawn_nodes(block)),
        "rules": [(printable(rule, 80), colours[rule]) for rule in rules],
        "notes": [printable(note, 400) for note in block.notes],
        "svg": Markup(block_svg(block, dump, colours)),
        "text": render_block(block),
    }


def _matches(dump: ModelDump, colours: Mapping[str, int]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for match in dump.matches:
        groups.setdefault((match.rule, match.pattern), []).append(match.site)
    return [
        {"rule": printable(rule, 80), "pattern": printable(pattern, 80), "site": site, "colour": colours[rule]}
        for (rule, pattern), sites in groups.items()
        for site in collapse(sites)
    ]


def _tree_line(line: TreeLine, blocks: Sequence[BlockDump], colours: Mapping[str, int]) -> dict[str, Any]:
    """Return a line of the tree with its block and its FQN inside that block."""
    block = next((i for i, b in enumerate(blocks) if any(is_inside(line.first, site) for site in b.sites)), None)
    module = ""
    if block is not None:
        site = next(site for site in blocks[block].sites if is_inside(line.first, site))
        module = printable(line.first[len(site) + 1 :], 4000)
    return {
        **asdict(line),
        "depth": min(line.depth, 6),
        "block": block,
        "module": module,
        "size": quantity(line.bytes * line.copies, "B") if line.bytes else "",
        "colour": colours.get(line.rule, 0),
    }


def _data(dump: ModelDump, layer: int | None, colours: Mapping[str, int]) -> dict[str, Any]:
    """Return the data of the page's script: nodes with printable strings, as in the pictures."""
    blocks: list[dict[str, Any]] = []
    for block in dump.of_layer(layer):
        bound = captured_nodes(block, dump)
        nodes = [
            {
                **_printable(asdict(node)),
                "colour": colours.get(node.rule, 0),
                "bound": _printable(bound.get(node.name, ())),
            }
            for node in block.nodes
        ]
        blocks.append({"key": printable(block.key, 80), "nodes": nodes})
    return {"stage": dump.stage, "blocks": blocks}


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value, 4000)
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in cast("Sequence[Any]", value)]
    return value


def _model_size(dump: ModelDump) -> str:
    parameters = sum(module.parameters for module in dump.modules)
    return f"{quantity(parameters)} parameters" if parameters else ""


def _span(rule: str, dumps: Sequence[ModelDump]) -> str:
    nodes = (node for dump in dumps for block in dump.blocks for node in block.nodes)
    return next((printable(node.span) for node in nodes if node.rule == rule and node.span), "")
