"""The values of the planner: a candidate, its price, and what was chosen among which others."""

from __future__ import annotations

from dataclasses import dataclass

from ktc.stages.cost import Prediction
from ktc.stages.plan.types import Choices, Plan


@dataclass(frozen=True, slots=True)
class Candidate:
    """Choices under a name that people read: `experts on the CPU`."""

    name: str
    choices: Choices


@dataclass(frozen=True, slots=True)
class Priced:
    """A candidate as planned, with a prediction per use. `lacks` says why it is impossible, "" if it fits.

    `seconds` is the sum over the uses, weighted as `uses_of` says.
    """

    candidate: Candidate
    plan: Plan | None
    predictions: tuple[Prediction, ...]
    seconds: float
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class Processes:
    """`count` processes, each with the plan of `candidate`: seconds of a step of `tokens` in all.

    `sent` are the bytes of gradients that each sends to others in it.
    """

    count: int
    candidate: str
    seconds: float
    tokens: int
    sent: float

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all processes in a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Chosen:
    """The plan that is carried out, and every candidate in the order of their seconds, those that do not fit last.

    `processes` is what one process on each GPU would do, for several GPUs.
    """

    plan: Plan
    priced: tuple[Priced, ...]
    processes: Processes | None = None

    @property
    def best(self) -> Priced:
        """The candidate of the plan."""
        return self.priced[0]
