"""`WeightSource`: how one tensor of a checkpoint reaches its place in the model; `weights.json` is a list of them.

Capture makes them, link writes them, the loader follows them: it needs no naming scheme of any model family.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from ktc.checkpoint.header import ITEM_SIZE
from ktc.decode import Undecodable, decode

Part = Literal["gate", "up", "down", "gate_up"]
Transform = Literal["copy", "per_expert"]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor of the checkpoint and where it goes.

    `copy` takes the whole tensor: to the parameter or buffer `target`, or, with `expert` and `part`, to that expert's
    matrix of the 3-D `target`. `per_expert` takes a tensor `(E, rows, columns)` apart, one expert at a time; its part
    is `down`, or `gate_up` whose rows are gate first, then up. `dtype` and `shape` are those in the checkpoint.
    """

    target: str
    expert: int | None
    part: Part | None
    source_key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    transform: Transform = "copy"


def write_sources(sources: Sequence[WeightSource]) -> str:
    """The text of `weights.json`: a JSON array with one row per line."""
    return "[\n" + ",\n".join(json.dumps(asdict(source)) for source in sources) + "\n]\n"


def read_sources(text: str) -> tuple[WeightSource, ...]:
    """The rows of a `weights.json`. Raises `ValueError` where a row is not one."""
    rows: object = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("expected a JSON array")
    return tuple(_read_source(row) for row in cast("list[object]", rows))


def _read_source(row: object) -> WeightSource:
    try:
        source = decode(row, WeightSource)
    except Undecodable as error:
        target = cast("dict[str, Any]", row).get("target") if isinstance(row, dict) else None
        raise ValueError(f"the row of `{target}`: {error}") from error
    if source.dtype not in ITEM_SIZE or "/" in source.file or source.file.startswith("."):
        raise ValueError(f"the row of `{source.target}` has an unknown dtype or file")
    if min((0, source.expert or 0, *source.shape)) < 0:
        raise ValueError(f"the row of `{source.target}` has a negative size or expert")
    stacked = source.transform == "per_expert" and source.expert is None and source.part in ("gate_up", "down")
    whole = source.transform == "copy" and (source.expert is None) == (source.part is None)
    if not (stacked and len(source.shape) == 3) and not whole:
        raise ValueError(f"the row of `{source.target}` has a transform, expert and part that do not belong together")
    return source
