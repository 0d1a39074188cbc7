"""Where an experts module of a model's own keeps its matrices, and how its layer calls it. Nothing imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["hidden", "index", "weights"]
# routed: hidden states, indices, weights. identity: indices beyond the last expert return the hidden states. by_expert:
# rows (E N, H) that are sorted by expert, N for each, without indices or weights.
Called = Literal["routed", "identity", "by_expert"]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensor that holds one part of all experts: (E, rows, columns), by its name in the module.

    `flat`: the experts are concatenated along the first dimension. `turned`: each matrix is (inputs, outputs).
    """

    name: str
    flat: bool = False
    turned: bool = False
