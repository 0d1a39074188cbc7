"""Plans of one captured model on other machines, under other budgets and for other numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ktc.diagnostics import KtcError
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.checkpoint import WeightSource
from ktc.stages.capture import CapturedModel
from ktc.stages.choose.choose import Planner
from ktc.stages.choose.types import Chosen
from ktc.stages.match import match
from ktc.stages.plan.types import ANY_SIZE, BatchShape


@dataclass(frozen=True, slots=True)
class Case:
    """A machine by its name, budgets in bytes by device, and the size of input that must fit."""

    machine: str
    host: Host
    budgets: Mapping[str, int] = field(default_factory=dict[str, int])
    shape: BatchShape = ANY_SIZE


def what_if(
    captured: CapturedModel, weights: Sequence[WeightSource], rules: RuleSet, cases: Iterable[Case]
) -> Iterator[tuple[Case, Chosen | KtcError]]:
    """Yield each case with what the planner chooses, or with its refusal."""
    for case in cases:
        program = replace(rules, plan={**rules.plan, **case.budgets})
        try:
            matches = match(captured, program, case.host)
            yield case, Planner(captured, weights, matches, program, case.host, case.shape).chosen()
        except KtcError as error:
            yield case, error
