"""Data parallel: the predicted step of one process on each GPU, started by torchrun, beside the plan that is chosen.

In: the candidates for one GPU, and the host. Out: the fastest of them with its part of the sequences and of the cores,
and the exchange of the adapter's gradients (Patarasu and Yuan, 2009: a ring sends each byte 2 (N - 1) / N times).
ktc does not start processes, so this is never chosen: it is what the user may do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ktc.foundation.host import Host
from ktc.stages.choose.types import Priced, Processes
from ktc.stages.choose.uses import uses_of
from ktc.stages.cost import Prediction
from ktc.stages.plan.placement import BUDGET_SHARE
from ktc.stages.plan.types import BatchShape, Plan

_GRADIENT, _ADAPTER = 4, 16  # bytes of a gradient, and of a parameter with its gradient and moments


def data_parallel(
    priced: Sequence[Priced], host: Host, shape: BatchShape, predict: Callable[[Plan, Host, BatchShape], Prediction]
) -> Processes | None:
    """Return the fastest step of one process per GPU; None for one GPU, one sequence, or where no plan trains on one.

    `predict` prices a plan on a host.
    """
    count = len(host.gpus)
    plans = [
        (one, one.plan)
        for one in priced
        if one.plan is not None and not one.lacks and _is_of_one(one.plan) and _has_room(one.plan, count, host)
    ]
    if count < 2 or not plans or plans[0][1].mode != "train":
        return None
    use = uses_of("train", shape)[0][0]
    part = replace(shape, batch=use.batch // count, length=use.length)
    if not part.batch:
        return None
    share = replace(host, cores=max(1, host.cores // count), threads=max(1, host.threads // count))
    results = [(predict(plan, share, part).seconds, one) for one, plan in plans]
    seconds, best = min(results, key=lambda result: result[0])
    assert best.plan is not None, "plans were filtered"
    sent = 2 * (count - 1) / count * _GRADIENT * _parameters(best.plan)
    peer = host.rates.peer
    link = host.rates.gpus[0].bus.median / 2 if peer is None else peer.median  # through host memory, in and out
    return Processes(count, best.candidate.name, seconds + sent / link, count * part.batch * use.length, sent)


def _is_of_one(plan: Plan) -> bool:
    used = {device.device for device in plan.devices if device.weights + device.streaming}
    return used <= {"cpu", "cuda:0"} and "cuda:0" in used


def _has_room(plan: Plan, count: int, host: Host) -> bool:
    """Return whether host memory holds what each process loads."""
    loaded = sum(device.weights + device.adapter for device in plan.devices if device.device == "cpu")
    return count * loaded <= BUDGET_SHARE * host.memory


def _parameters(plan: Plan) -> float:
    return sum(device.adapter for device in plan.devices) / _ADAPTER
