"""The planner: of the plans that fit a machine, the one whose predicted time is shortest."""

from ktc.stages.choose.choose import choose_plan, predictions_of
from ktc.stages.choose.fitting import FORMAT, with_less_room, with_ways_out
from ktc.stages.choose.types import Chosen, Priced
from ktc.stages.choose.uses import uses_of
from ktc.stages.choose.what_if import Case, what_if

__all__ = [
    "FORMAT",
    "Case",
    "Chosen",
    "Priced",
    "choose_plan",
    "predictions_of",
    "uses_of",
    "what_if",
    "with_less_room",
    "with_ways_out",
]
