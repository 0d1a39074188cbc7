"""The record of a comparison of a trainer's path and a serving path: values, and how they were obtained.

In: the differences of a run. Out: a frozen `Report` and its JSON. A cell is one model that trains and one that serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from ktc.inference.consistency.scores import Difference

SCHEMA: Final = 1
Path = Literal["calls", "prompt", "decode"]
PATHS: Final[tuple[Path, ...]] = ("calls", "prompt", "decode")
MEANINGS: Final[Mapping[Path, str]] = {
    "calls": "a forward of the same batches as on the other side",
    "prompt": "each sequence read as a prompt",
    "decode": "one token after the other by `generate`",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One model that trains (or stock) against one that serves, on each path. `matched`: both are one compilation."""

    trained: str
    served: str
    matched: bool
    paths: Mapping[Path, Difference]


@dataclass(frozen=True, slots=True)
class Side:
    """A model by its name in the table. `experts` are the weight formats of its routed experts.

    `how` says how a trainer's micro-batches were computed, or of which weights stock consists; "" for one that serves.
    """

    name: str
    folder: str
    dtype: str
    experts: tuple[str, ...]
    adapter: str
    how: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `autocast`: the trainer's path is under autocast of bf16, as `ktc train` is with a bf16 model.

    `stock_rounding` is stock in the model's dtype against stock in fp32, of the same weights, where stock is a side.
    """

    schema: int
    date: str
    versions: Mapping[str, str]
    against: str
    tokens: str
    sequences: int
    length: int
    prompt: int
    batch_size: int
    attention: str
    autocast: bool
    seed: int
    large: float
    trained: tuple[Side, ...]
    served: tuple[Side, ...]
    cells: tuple[Cell, ...]
    stock_rounding: Mapping[str, Difference]
    seconds: float

    @property
    def matched(self) -> tuple[Cell, ...]:
        """The cells of one compilation; all where there is a single cell."""
        return self.cells if len(self.cells) == 1 else tuple(cell for cell in self.cells if cell.matched)

    def faults(self, max_mean: float | None, exact: bool) -> tuple[str, ...]:
        """Return what breaks the bounds: a mean of decoding above `max_mean`, or calls that are not `exact`."""
        faults: list[str] = []
        for cell in self.matched:
            where, decode, calls = f"{cell.trained} -> {cell.served}", cell.paths["decode"], cell.paths["calls"]
            if max_mean is not None and (decode.mean is None or decode.mean > max_mean):
                mean = "not finite" if decode.mean is None else f"{decode.mean:.2e}"
                faults.append(f"{where}: the mean of decoding is {mean}, above {max_mean:g}")
            if exact and not calls.exact:
                faults.append(f"{where}: the trainer's calls do not give the same bits")
        return tuple(faults)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)
