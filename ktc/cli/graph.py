"""`ktc graph`: the dump of one stage, or the difference of two, in the requested format.

A compiled model and a graph file are read. A model that is not compiled is compiled up to the rewrite: no weight is
read and no file is written. Refuses a layer the model lacks, and a difference as a picture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktc.cli.following import Words, loading
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.module_paths import is_inside
from ktc.stages.pictures.dump import ModelDump, Stage, read_dump, to_json

if TYPE_CHECKING:
    from ktc.stages.pictures.measured import Measured

STAGES: tuple[Stage, ...] = ("captured", "matched", "planned", "rewritten")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `ktc graph`."""

    model: str | None
    rules: str
    stage: Stage
    layer: int | None
    form: str
    diff: tuple[str, str] | None
    color: bool = False
    trust_remote_code: bool = False
    text_only: bool = False


def render(request: Request) -> str:
    """Return the text to print or to write.

    Raises:
        InputRefused: the request (U011-U013) or an input of the compiler is refused.
        HostLacks: the layout library of pictures is missing (H243).
    """
    if request.diff is not None:
        return _difference(request, *request.diff)
    assert request.model is not None, "one of the two is given"
    if request.form in ("svg", "html"):
        from ktc.stages.pictures.layout import require_layout

        require_layout()  # before the model is opened
    # a page shows the stages up to this one, every other format only this one
    stages = STAGES[: STAGES.index(request.stage) + 1] if request.form == "html" else (request.stage,)
    dumps = _dumps(request, request.model, stages)
    dump = dumps[-1]
    if request.layer is not None and not dump.of_layer(request.layer):
        layers = sorted({layer for block in dump.blocks for layer in block.layers})
        numbers = f"{layers[0]} to {layers[-1]}" if layers else "none"
        raise InputRefused(Diagnostic("U011", f"the model has no layer {request.layer}: its layers are {numbers}"))
    measured = _measured(Path(request.model)) if request.stage == "rewritten" else ()
    if request.form == "html":
        from ktc.stages.pictures.html import render_html

        return render_html(dumps, request.layer, measured)
    if request.form == "json":
        return to_json(_of_layer(dump, request.layer))
    if request.form == "dot":
        from ktc.stages.pictures.dot import render_dot

        return render_dot(dump, request.layer, measured)
    if request.form == "svg":
        from ktc.stages.pictures.svg import render_svg

        return render_svg(dump, request.layer, measured)
    from ktc.stages.pictures.text import render_text

    return render_text(dump, request.layer, colour=request.color, measured=measured)


def following(request: Request) -> Words:
    """Return the words of the command that usually follows; none after graph files, and where nothing is decided."""
    if request.model is None or Path(request.model).is_file() or request.stage == "captured":
        return ()
    if (Path(request.model) / "ktc.json").is_file():
        return ("ktc", "prove", request.model)
    options = loading(None, request.trust_remote_code, text_only=request.text_only)
    return ("ktc", "check", request.rules, request.model, *options)


def _difference(request: Request, first: str, second: str) -> str:
    from ktc.stages.pictures.diff import diff

    if request.form not in ("text", "json"):
        raise InputRefused(Diagnostic("U012", f"a difference is written as text or json, not as `{request.form}`"))
    before, after = (_side(request, side) for side in (first, second))
    difference = diff(before, after)
    return json.dumps(difference.to_json(), indent=1) if request.form == "json" else difference.text()


def _side(request: Request, side: str) -> ModelDump:
    """Return one side of a difference: a stage of MODEL, otherwise a compiled model, a model or a graph file."""
    if request.model is not None and side in STAGES:
        return _dumps(request, request.model, (side,))[0]
    if side in STAGES and not Path(side).exists():
        raise InputRefused(
            Diagnostic("U013", f"`{side}` is a stage: MODEL is missing", hint=f"`ktc graph MODEL --diff {side} ...`")
        )
    return _dumps(request, side, (request.stage,))[0]


def _dumps(request: Request, model: str, stages: Sequence[Stage]) -> list[ModelDump]:
    """Return the stages of a model, compiled or not. A graph file has one stage."""
    path = Path(model)
    if path.is_file():
        return [read_dump(path)]
    if (path / "ktc.json").is_file():
        return [read_dump(path / "graph" / f"{stage}.json") for stage in stages]
    from ktc import compiler

    return compiler.dumps(
        model, request.rules, stages, trust_remote_code=request.trust_remote_code, text_only=request.text_only
    )


def _measured(out: Path) -> tuple[Measured, ...]:
    """Return the comparisons that `ktc prove` recorded in a compiled model, none if it recorded none."""
    from ktc.inference.prove.report import read_report
    from ktc.stages.pictures.measured import Measured

    report = read_report(out)
    return tuple(
        Measured(layer.index, f"{layer.fqn}.{row.what}".rstrip("."), row.ktc, row.stock, row.red)
        for layer in (report.layers if report is not None else ())
        for row in layer.rows
    )


def _of_layer(dump: ModelDump, layer: int | None) -> ModelDump:
    """Return the dump with only the blocks of `layer` and the matches in them."""
    if layer is None:
        return dump
    blocks = dump.of_layer(layer)
    sites = {site for block in blocks for site in block.sites}
    matches = tuple(m for m in dump.matches if any(is_inside(m.site, s) for s in sites))
    return replace(dump, blocks=blocks, matches=matches)
