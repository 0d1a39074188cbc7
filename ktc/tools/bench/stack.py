"""The layers of a measured model: all of its config, or the first of them in a config that is written for the run.

In: MODEL and a number of layers. Out: a `Stack`. Refused (U030): more layers than the model has, and so few that none
of them has experts. A model whose config shows no experts is left to the compiler.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from ktc.foundation.decode import read_json
from ktc.foundation.files import write_file
from ktc.foundation.regular_files import read_regular
from ktc.model import twin
from ktc.stages.capture import open_model
from ktc.tools.bench.machine import machine
from ktc.tools.bench.options import Request, refused
from ktc.tools.bench.report import ComparisonReport

SCHEMA: Final = 1


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
        """The layers with experts of the whole depth, as a multiple of those in this run."""
        return self.with_experts_of_depth / self.with_experts


def stack_of(model: str, layers: int | None, folder: Path) -> Stack:
    """Return the first `layers` of MODEL, or all. Their config is written into `folder` unless it is MODEL's own.

    Raises InputRefused: U030, and the codes of `open_model`.
    """
    source = open_model(model, fetch_weights=False)
    if source.folder is None:
        raise refused(f"`{model}` has no folder with config.json")
    settings = cast("dict[str, Any]", read_json(read_regular(source.folder / "config.json")))
    depth = twin.depth_of(settings)
    if depth is None:
        raise refused(f"config.json of `{model}` does not say how many layers the model has")
    sparse, layers = twin.layers_with_experts(settings), layers or depth
    if layers > depth:
        raise refused(f"`--layers {layers}`: the model has {depth}")
    if layers <= min(sparse, default=depth):
        raise refused(f"`--layers {layers}`: the first layer with experts is number {min(sparse, default=depth) + 1}")
    kept = sum(number < layers for number in sparse)
    if layers == depth:
        return Stack(model, layers, depth, kept, len(sparse))
    folder.mkdir()
    write_file(folder / "config.json", json.dumps(twin.first_layers(settings, layers), indent=2))
    return Stack(folder, layers, depth, kept, len(sparse))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReport(ComparisonReport):
    """The report of a compiled model. `seconds` has the times of preparation: compiling, loading.

    `request` are the words of the command line.
    """

    machine: Mapping[str, str]
    request: Mapping[str, Any]
    layers: int
    depth: int
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return {"schema": SCHEMA, **ComparisonReport.to_json(self)}

    @property
    def of_depth(self) -> str:
        """The number of measured layers, as text."""
        return f"{self.layers}{'' if self.layers == self.depth else f' of {self.depth}'} layers"

    def headline(self, work: str) -> str:
        """Return the layers, the work and the machine."""
        where = f"{self.machine['gpus'] or 'no GPU'}; {self.machine['cpu']}, {self.machine['cores']} cores"
        return f"{self.of_depth}, {work}, on {where}, {self.machine['isa']}"


def facts_of(request: Request, stack: Stack, *packages: str) -> dict[str, Any]:
    """Return the fields of a report about the machine, with the versions of `packages`, the request and the model."""
    words = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(request).items()}
    return {"machine": machine(*packages), "request": words, "layers": stack.layers, "depth": stack.depth}


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Generator[None]:
    """Record the seconds of the block."""
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began
