"""Data parallel: the predicted step of one process on each GPU, as a candidate.

In: the candidates for one GPU, and the host. Out: the fastest of them with its part of the sequences and of the cores,
and the exchange of the adapter's gradients (Patarasu and Yuan, 2009: a ring sends each byte 2 (N - 1) / N times).
Experts that are sent are shared by the processes. `ktc train` starts them where that is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ktc.foundation.host import Host
from ktc.stages.choose.fitting import needed_bytes
from ktc.stages.choose.types import Candidate, Priced, Processes
from ktc.stages.choose.uses import uses_of
from ktc.stages.cost import Prediction
from ktc.stages.plan.placement import BUDGET_SHARE
from ktc.stages.plan.types import BatchShape, Plan

Predict = Callable[[Plan, Host, BatchShape, int], Prediction]
_GRADIENT, _ADAPTER = 4, 16  # bytes of a gradient, and of a parameter with its gradient and moments


def data_parallel(
    priced: Sequence[Priced], host: Host, shape: BatchShape, predict: Predict
) -> tuple[Processes, Priced | None] | None:
    """Return the fastest step of one process per GPU; None for one GPU, one sequence, or where no plan trains on one.

    `predict` prices a plan of one of so many processes on its part of a host. The candidate is None where sequences
    cannot be shared out evenly. GPUs have to be alike, and the one with least free memory holds what the first has to.
    """
    count = len(host.gpus)
    plans = [
        (one, one.plan)
        for one in priced
        if one.plan is not None and not one.lacks and _is_of_one(one.plan) and _has_room(one.plan, host)
    ]
    alike = len({(gpu.name, gpu.memory) for gpu in host.gpus}) == 1
    if count < 2 or not alike or not plans or plans[0][1].mode != "train":
        return None
    use = uses_of("train", shape)[0][0]
    part = replace(shape, batch=use.batch // count, length=use.length)
    if not part.batch:
        return None
    share = replace(host, cores=max(1, host.cores // count), threads=max(1, host.threads // count))
    results = [(predict(plan, share, part, count), one, plan) for one, plan in plans]
    step, best, plan = min(results, key=lambda result: result[0].seconds)
    sent = 2 * (count - 1) / count * _GRADIENT * _parameters(plan)
    peer = host.rates.peer
    link = host.rates.gpus[0].bus.median / 2 if peer is None else peer.median  # through host memory, in and out
    seconds = step.seconds + sent / link
    processes = Processes(count, best.candidate.name, seconds, count * part.batch * use.length, sent)
    if use.batch % count:
        return processes, None
    whole = replace(step, use=use, seconds=seconds)
    candidate = Candidate(f"a process on each of {count} GPUs: {best.candidate.name}", best.candidate.choices)
    return processes, Priced(candidate, replace(plan, processes=count), (whole,), seconds)


def _is_of_one(plan: Plan) -> bool:
    used = {device.device for device in plan.devices if device.weights + device.streaming}
    return used <= {"cpu", "cuda:0"} and "cuda:0" in used


def _has_room(plan: Plan, host: Host) -> bool:
    """Return whether each GPU holds what the plan needs of the first, and host memory what each process loads."""
    loaded = sum(device.weights + device.adapter for device in plan.devices if device.device == "cpu")
    least = min(gpu.free for gpu in host.gpus)
    fits = needed_bytes(plan).get("cuda:0", 0) <= BUDGET_SHARE * least
    return fits and len(host.gpus) * loaded <= BUDGET_SHARE * host.memory


def _parameters(plan: Plan) -> float:
    return sum(device.adapter for device in plan.devices) / _ADAPTER
