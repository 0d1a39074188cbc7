"""The layers of a measured model: all of its config, or the first of them in a config that is written for the run.

In: MODEL and a number of layers. Out: a `Stack`. Refused (U030): more layers than the model has, and so few that none
of them has experts. A model whose config shows no experts is left to the compiler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import read_json
from ktc.foundation.files import write_file
from ktc.foundation.regular_files import read_regular
from ktc.model import twin
from ktc.stages.capture import open_model


@dataclass(frozen=True, slots=True)
class Stack:
    """MODEL for the compiler, and how much of it that is: `depth` is of its config, `layers` of this run."""

    model: str | Path
    layers: int
    depth: int
    with_experts: int  # of `layers`
    with_experts_of_depth: int

    @property
    def is_whole(self) -> bool:
        """Whether every layer is measured."""
        return self.layers == self.depth

    @property
    def times_whole(self) -> float:
        """How many times as many layers with experts the whole depth has."""
        return self.with_experts_of_depth / self.with_experts


def stack_of(model: str, layers: int | None, folder: Path) -> Stack:
    """Return the first `layers` of MODEL, or all. Their config is written into `folder` unless it is MODEL's own.

    Raises InputRefused: U030, and the codes of `open_model`.
    """
    source = open_model(model, fetch_weights=False)
    if source.folder is None:
        raise _refused(f"`{model}` has no folder with config.json")
    settings = cast("dict[str, Any]", read_json(read_regular(source.folder / "config.json")))
    depth = twin.depth_of(settings)
    if depth is None:
        raise _refused(f"config.json of `{model}` does not say how many layers the model has")
    sparse, layers = twin.layers_with_experts(settings), layers or depth
    if layers > depth:
        raise _refused(f"`--layers {layers}`: the model has {depth}")
    if layers <= min(sparse, default=depth):
        raise _refused(f"`--layers {layers}`: the first layer with experts is number {min(sparse, default=depth) + 1}")
    kept = sum(number < layers for number in sparse)
    if layers == depth:
        return Stack(model, layers, depth, kept, len(sparse))
    folder.mkdir()
    write_file(folder / "config.json", json.dumps(twin.first_layers(settings, layers), indent=2))
    return Stack(folder, layers, depth, kept, len(sparse))


def _refused(message: str) -> InputRefused:
    return InputRefused(Diagnostic("U030", message, hint="`--help` lists the options"))
