"""Why the planner chose a plan: a sentence for the model, and one for each kind of module on its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ktc.foundation.host import Host
from ktc.foundation.rates import Rates
from ktc.stages.capture import CapturedModel
from ktc.stages.choose.types import Priced
from ktc.stages.cost import Use, Work, predict, work_of
from ktc.stages.cost.amounts import Amounts
from ktc.stages.plan.types import Plan, Reason

_NAMES = {
    "attention": "attention", "experts": "routed experts", "mlp": "dense and shared MLPs, routers",
    "norms": "norms", "lm_head": "the head",
}  # fmt: skip


def reasons_of(captured: CapturedModel, best: Priced, others: Sequence[Priced], host: Host) -> Iterator[Reason]:
    """Yield the reasons of the chosen candidate, beside the fastest other that fits and those that do not."""
    plan = best.plan
    assert plan is not None, "a chosen candidate has a plan"
    text = f"planned as `{best.candidate.name}`: {speeds(best)}, by {host.rates.origin} rates"
    yield Reason("model", text)
    if other := next((one for one in others if not one.lacks), None):
        yield Reason("model", f"slower or larger: `{other.candidate.name}` with {speeds(other)}")
    impossible = {one.candidate.name: one.lacks for one in others if one.lacks}
    for name, why in impossible.items():
        yield Reason("model", f"impossible: `{name}`, because {why}")
    yield from _of_kinds(captured, plan, best.predictions[-1].use, host)


def speeds(priced: Priced) -> str:
    """Return the predicted tokens per second of each use, and the engine that each waits for."""
    return "; ".join(
        f"{one.use}: {one.tokens_per_second:,.0f} token/s, bound by {one.binds}" for one in priced.predictions
    )


def _of_kinds(captured: CapturedModel, plan: Plan, use: Use, host: Host) -> Iterator[Reason]:
    rates, groups = host.rates, dict[tuple[str, str], list[Work]]()
    for work in work_of(captured, plan):
        groups.setdefault((work.kind, _engine(work, use)), []).append(work)
    for (kind, engine), works in groups.items():
        first = works[0]
        here = predict((first,), use, rates, host.workers).seconds
        text = f"on {engine}: {Amounts(use).intensity(first):,.1f} FLOP per byte in {use}, {_time(here)} a layer"
        if elsewhere := _elsewhere(first, engine, rates):
            there = predict((elsewhere,), use, rates, host.workers).seconds
            text += f" and {_time(there)} on {elsewhere.device}"
            if first.weights:
                text += f", {(there - here) / first.weights * 1e12:,.1f} us saved per MB"
        yield Reason(f"{_NAMES.get(kind, kind)}", f"{text} ({len(works)} in all)")


def _engine(work: Work, use: Use) -> str:
    experts = work.experts
    if experts is None:
        return work.device
    if experts.engines(use) is not None:
        return f"{experts.devices[0]}, its bus and the CPU at once"
    devices = experts.sent_to(use.tokens)
    if not devices or devices == ("cpu",):
        return "the CPU"
    return " and ".join(devices) + ("" if experts.resident else " from host memory")


def _elsewhere(work: Work, engine: str, rates: Rates) -> Work | None:
    """Return the same work on the other side: the CPU, or the first GPU."""
    if not rates.gpus:
        return None
    if work.experts is not None:
        on_gpu = engine.startswith("cuda")
        experts = replace(work.experts, devices=() if on_gpu else ("cuda:0",), least=1, kept=0.0, bus_share=None)
        return replace(work, experts=experts, device="cpu" if on_gpu else "cuda:0")
    return replace(work, device="cuda:0" if work.device == "cpu" else "cpu")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.1f} us"
