"""A plan that is over its budgets, and the ways out: the smallest budgets that work, and formats that need fewer bytes.

In: the chosen plan, and a function that chooses for another `format`. Out: the same plan, whose messages (M070) name
both. Nothing is changed unasked: a format is named with its bytes and with its cost in accuracy. `with_less_room` is
the host for the next smaller plan, where one turned out too large for its GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from ktc.diagnostics import KtcError
from ktc.foundation.host import Gpu, Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.stages.choose.types import Chosen
from ktc.stages.plan import Plan
from ktc.stages.plan.placement import BUDGET_SHARE, gib
from ktc.stages.plan.types import Workload

FORMAT: Final = "format"  # of the bundled programs: the format of the routed experts' weights
# From most to least exact; the costs are those that docs/details/quantisation.md measures.
COSTS: Final[Mapping[str, str]] = {
    "int8": "rounds weights and activations to 8 bits, which differs from bf16 by little more than its own rounding",
    "int4": "rounds weights to 4 bits in groups of 32, which cost 0.001 to 0.002 of loss on a small model",
}
_LEFT: Final = 0.85  # of the planned bytes of a GPU, which the next smaller plan may use in all
_SEE: Final = "docs/details/quantisation.md has the measurements"


def with_ways_out(chosen: Chosen, rules: RuleSet, in_format: Callable[[str], Chosen]) -> Chosen:
    """Return the plan with hints of what would fit, where a device has too little for the permanent bytes."""
    plan = chosen.plan
    if all(problem.code != "M070" for problem in plan.over_budget):
        return chosen
    formats = list(_formats(chosen, rules, in_format))
    hint = "; ".join([_smallest(_tightest(chosen)), *formats, *[_SEE] * bool(formats)])
    problems = (replace(one, hint=hint if one.code == "M070" else one.hint) for one in plan.over_budget)
    return replace(chosen, plan=replace(plan, over_budget=tuple(problems)))


def needed_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes by device that the plan needs at its sizes of input, in the use that needs least."""
    return {device: sum(sizes.values()) for device, sizes in _least(plan).needs.items()}


def _least(plan: Plan) -> Workload:
    """Return the use of the program's mode that needs least memory, the last of them."""
    uses = plan.memory.workloads
    return ([use for use in uses if use.name.startswith(plan.mode)] or [*uses])[-1]


def _tightest(chosen: Chosen) -> Plan:
    """Return the plan that is short of fewest bytes: the planner's candidates may need less than the first."""
    plans = [chosen.plan, *(one.plan for one in chosen.priced if one.plan is not None)]
    return min(plans, key=_shortfall)


def _shortfall(plan: Plan) -> int:
    needed = needed_bytes(plan)
    return sum(max(0, needed.get(one.device, 0) - one.budget) for one in plan.devices if one.budget is not None)


def _smallest(plan: Plan) -> str:
    use = _least(plan)
    budgets = ", ".join(f"`{device} = {gib(size)}`" for device, size in needed_bytes(plan).items())
    return f"the smallest budgets that work are {budgets}, with batch {use.batch} and length {use.length}"


def _formats(chosen: Chosen, rules: RuleSet, in_format: Callable[[str], Chosen]) -> Iterator[str]:
    """Yield the formats of the routed experts that need fewer bytes than those before, in words."""
    current = rules.units[0].params.get(FORMAT)
    if not isinstance(current, str):
        return
    names = list(COSTS)
    names = names[names.index(current) + 1 :] if current in names else names
    least = sum(needed_bytes(_tightest(chosen)).values())
    for name in names:
        try:
            other = in_format(name)
        except KtcError:
            continue  # the checkpoint or the sizes do not permit it
        needed = needed_bytes(tightest := _tightest(other))
        if sum(needed.values()) < least:
            least = sum(needed.values())
            use = _least(tightest)
            short = f"leaves too little for batch {use.batch} and length {use.length}, and needs in all"
            fits = "still does not fit" if other.plan.over_budget else short if _shortfall(tightest) else "fits"
            sizes = ", ".join(f"{gib(size)} on `{device}`" for device, size in needed.items())
            yield f"`--set {FORMAT}={name}` {fits}{'' if fits is short else ' with'} {sizes}: it {COSTS[name]}"


def with_less_room(host: Host, planned: Mapping[str, int]) -> Host | None:
    """Return the host for a plan that needs less of every GPU that holds `planned` bytes, None if none holds any.

    Room for weights and activations together is then less than what the weights alone were planned to take.
    """
    gpus = tuple(_less(gpu, planned.get(f"cuda:{number}", 0)) for number, gpu in enumerate(host.gpus))
    return None if gpus == host.gpus else replace(host, gpus=gpus)


def _less(gpu: Gpu, planned: int) -> Gpu:
    if not planned:
        return gpu
    return replace(gpu, taken=max(gpu.taken, gpu.memory - int(_LEFT * planned / BUDGET_SHARE)))
