"""Captured model, matches and rules on a host -> the plan with the shortest predicted time, if the rules let choose.

`plan { auto = intensity }` asks for it. Every candidate is planned and priced as it would run. Of those that fit, the
fastest is taken; where predictions do not tell two apart, the one that needs fewer bytes in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ktc.diagnostics import KtcError
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.checkpoint import WeightSource
from ktc.stages.capture import CapturedModel
from ktc.stages.choose.candidates import CPU, Candidate, Question, candidates
from ktc.stages.choose.processes import data_parallel
from ktc.stages.choose.reasons import reasons_of
from ktc.stages.choose.types import Chosen, Priced
from ktc.stages.choose.uses import uses_of
from ktc.stages.cost import Prediction, predict, work_of
from ktc.stages.cost.predict import Issue
from ktc.stages.match import Matches
from ktc.stages.plan import make_plan
from ktc.stages.plan.kept import places_of
from ktc.stages.plan.placement import budget_of
from ktc.stages.plan.types import ANY_SIZE, NO_CHOICES, BatchShape, Plan, Workload

_EVEN: Final = 0.9  # of the time of single experts: whole layers that are predicted so much faster stay
_EQUAL: Final = 1.01  # times that predictions do not tell apart
_PER_GPU: Final = 0.05
_ATTEMPTS: Final = 3  # with less room for weights, where activations do not fit beside them
_WORKSPACE: Final = 0.08  # of a GPU's budget, for activations, beside those that the plan counts


class Planner:
    """Plans of one model by one program on one host."""

    def __init__(
        self, captured: CapturedModel, weights: Sequence[WeightSource], matches: Matches, rules: RuleSet, host: Host,
        must_fit: BatchShape = ANY_SIZE,
    ) -> None:  # fmt: skip
        self._captured, self._weights, self._matches = captured, weights, matches
        self._rules, self._host, self._must_fit = rules, host, must_fit

    def plan(self, candidate: Candidate | None) -> Plan:
        """Return the plan of a candidate, or of a program that decides everything. Raises as `make_plan` does."""
        choices = candidate.choices if candidate else None
        return make_plan(self._captured, self._weights, self._matches, self._rules, self._host, self._must_fit, choices)

    def chosen(self) -> Chosen:
        """Return the best of all candidates. Raises as `make_plan` does where every one is refused."""
        if self._rules.plan.get("auto") != "intensity":
            return self._decided()
        base = self.plan(CPU)
        question = self._question(base)
        priced = [self._priced(CPU, base), *self._attempts(question)]
        latest, room = priced, question.room
        for _ in range(_ATTEMPTS):
            before, room = room, _room_left(room, latest)
            if room == before:
                break
            latest = self._attempts(replace(question, room=room))
            priced += [one for one in latest if all(one.candidate != other.candidate for other in priced)]
        processes = data_parallel(priced, self._host, self._must_fit, self._step)
        if processes is not None and processes[1] is not None:
            priced = [*priced, processes[1]]
        fitting = self._with_one_kind([one for one in priced if not one.lacks], len(question.experts))
        if not fitting:
            return Chosen(base, tuple(priced))
        least = min(map(_weighed, fitting))
        best = min((one for one in fitting if _weighed(one) <= _EQUAL * least), key=_bytes)
        others = sorted((one for one in priced if one is not best), key=lambda one: (bool(one.lacks), one.seconds))
        assert best.plan is not None, "a candidate that fits has a plan"
        reasons = reasons_of(self._captured, best, others, self._host)
        plan = replace(best.plan, reasons=(*reasons, *best.plan.reasons))
        return Chosen(plan, (replace(best, plan=plan), *others), None if processes is None else processes[0])

    def _with_one_kind(self, fitting: list[Priced], layers: int) -> list[Priced]:
        """Leave out the plans that keep some whole layers where one keeps single experts, or the reverse for a server.

        Both read as many bytes where choices are even, so predictions are about equal. Single experts follow choices
        that are not. A server's batches have more rows than the steps that read them; for other large batches, whole
        layers are predicted to be faster, and stay.
        """
        single = [one for one in fitting if _keeps(one)]
        whole = [one for one in fitting if one.candidate.choices.resident]
        if self._rules.plan.get("mode") == "serve":
            dropped = single if whole else []
        else:
            limit = _EVEN * min(map(_weighed, single), default=0.0)
            dropped = [o for o in whole if len(o.candidate.choices.resident) < layers and _weighed(o) >= limit > 0]
        return [one for one in fitting if one not in dropped]

    def _step(self, plan: Plan, host: Host, shape: BatchShape, processes: int) -> Prediction:
        return predictions_of(self._captured, plan, host, shape, processes)[-1]

    def _decided(self) -> Chosen:
        """Return the plan of a program that decides everything itself, with its price."""
        plan = self.plan(None)
        return Chosen(plan, (self._priced(Candidate("the program's own", NO_CHOICES), plan),))

    def _question(self, base: Plan) -> Question:
        room = tuple(
            int((1 - _WORKSPACE) * (budget_of(f"cuda:{number}", self._rules, self._host) or 0))
            for number in range(len(self._host.gpus))
        )
        uses = uses_of(base.mode, self._must_fit)
        return Question(self._captured, base, work_of(self._captured, base), self._host, uses, room)

    def _attempts(self, question: Question) -> list[Priced]:
        """Return the candidates with their prices; one without room for an expert is that without places."""
        priced = [self._attempt(candidate) for candidate in candidates(question) if candidate is not CPU]
        return [one for one in priced if one.plan is None or _keeps(one) or not one.candidate.choices.keeps]

    def _attempt(self, candidate: Candidate) -> Priced:
        try:
            return self._priced(candidate, self.plan(candidate))
        except KtcError as error:
            return Priced(candidate, None, (), 0.0, error.diagnostics[0].message)

    def _priced(self, candidate: Candidate, plan: Plan) -> Priced:
        predictions = predictions_of(self._captured, plan, self._host, self._must_fit)
        weights = (weight for _, weight in uses_of(plan.mode, self._must_fit))
        seconds = sum(weight * one.seconds for one, weight in zip(predictions, weights, strict=True))
        lacks = plan.over_budget[0].message if plan.over_budget else ""
        return Priced(candidate, plan, predictions, seconds, lacks)


def predictions_of(
    captured: CapturedModel, plan: Plan, host: Host, shape: BatchShape = ANY_SIZE, processes: int = 1
) -> tuple[Prediction, ...]:
    """Return the prediction of each use of a plan on a host, or on the part that one of several processes has."""
    works = work_of(captured, plan)
    stacked = any(spec.op == "fused_moe" for spec in plan.kernels)
    uses = tuple(use for use, _ in uses_of(plan.mode, shape))
    calls = 1 if stacked else uses[0].batch
    issue = Issue(plan.cuda_graph, plan.native_step, calls, compiled=stacked, whole=True, processes=processes)
    return tuple(predict(works, use, host.rates, host.workers, issue) for use in uses)


def choose_plan(
    captured: CapturedModel, weights: Sequence[WeightSource], matches: Matches, rules: RuleSet, host: Host,
    must_fit: BatchShape = ANY_SIZE,
) -> Chosen:  # fmt: skip
    """Return the plan of a program: chosen where it asks for that, otherwise as it decides, without a price.

    Raises as `make_plan` does.
    """
    planner = Planner(captured, weights, matches, rules, host, must_fit)
    if rules.plan.get("auto") != "intensity":
        return Chosen(planner.plan(None), ())
    return planner.chosen()


def _keeps(priced: Priced) -> bool:
    """Return whether a plan has places for single experts."""
    return priced.plan is not None and (places_of(priced.plan) or (0,))[0] > 0


def _room_left(room: tuple[int, ...], priced: Sequence[Priced]) -> tuple[int, ...]:
    """Return the bytes of weights on each GPU that leave enough for activations and caches of some candidate."""
    left = list(room)
    for number, of_gpu in enumerate(room):
        device = f"cuda:{number}"
        sizes = [
            _weights(one, device) - use.shortfall[device]
            for one in priced
            if one.lacks and one.plan
            for use in _last(one)
            if device in use.shortfall and _weights(one, device) <= of_gpu
        ]
        left[number] = max(0, min(of_gpu, max(sizes, default=of_gpu)))
    return tuple(left)


def _weights(priced: Priced, device: str) -> int:
    devices = priced.plan.devices if priced.plan else ()
    return sum(one.weights + one.adapter for one in devices if one.device == device)


def _last(priced: Priced) -> tuple[Workload, ...]:
    """Return the use of the program's mode that needs least memory."""
    assert priced.plan is not None, "the caller asks for candidates with a plan"
    uses = [use for use in priced.plan.memory.workloads if use.name.startswith(priced.plan.mode)]
    return tuple(uses[-1:])


def _weighed(priced: Priced) -> float:
    """Return the seconds, a twentieth more for each GPU after the first: predictions of several are less certain.

    Two GPUs that Python issues to were predicted at 0.98 of one GPU's time, and took 1.21 times as long.
    """
    devices = priced.plan.devices if priced.plan else ()
    gpus = sum(device.device != "cpu" and device.weights + device.streaming > 0 for device in devices)
    gpus *= priced.plan.processes if priced.plan else 1
    return priced.seconds * (1 + _PER_GPU * max(0, gpus - 1))


def _bytes(priced: Priced) -> tuple[int, float]:
    devices = priced.plan.devices if priced.plan else ()
    return sum(device.weights + device.streaming for device in devices), priced.seconds
