"""Plans of one captured model on other machines, under other budgets and for other numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ktc.diagnostics import KtcError
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.checkpoint import WeightSource
from ktc.stages.capture import CapturedModel
from ktc.stages.choose.choose import Planner
from ktc.stages.choose.fitting import with_ways_out
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
    captured: CapturedModel, weights: Sequence[WeightSource], rules: RuleSet, cases: Iterable[Case],
    in_format: Callable[[str], RuleSet] | None = None,
) -> Iterator[tuple[Case, Chosen | KtcError]]:  # fmt: skip
    """Yield each case with what the planner chooses, or with its refusal.

    With `in_format`, the program in another format of the experts, a plan that does not fit has the ways out.
    """
    for case in cases:

        def choose(program: RuleSet, case: Case = case) -> Chosen:
            program = replace(program, plan={**program.plan, **case.budgets})
            matches = match(captured, program, case.host)
            return Planner(captured, weights, matches, program, case.host, case.shape).chosen()

        try:
            chosen = choose(rules)
            if in_format is not None:
                chosen = with_ways_out(chosen, rules, lambda name, choose=choose: choose(in_format(name)))
            yield case, chosen
        except KtcError as error:
            yield case, error
