"""How long Python takes to issue operators while a run is measured.

These rates depend on what else the machine does: on six virtual machines of one kind, an operator of a small module
took 12 to 25 us, in two minutes of one machine 14 and 20, while steps took as long as before. So the least of a figure
counts that was found for the host file and before and after a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ktc.foundation.host import Host
from ktc.foundation.rates import Figure
from ktc.tools.measure import cpu, gpu


@dataclass(frozen=True, slots=True)
class IssueRates:
    """Seconds of one operator on the CPU, and per GPU those of an operator of a small module and of a kernel launch."""

    cpu: Figure
    operators: tuple[Figure, ...]
    launches: tuple[Figure, ...]


def issue_rates(host: Host) -> IssueRates:
    """Measure the rates now, in about a second."""
    devices = [torch.device("cuda", number) for number in range(len(host.rates.gpus))]
    return IssueRates(cpu.operator(), tuple(map(gpu.operator, devices)), tuple(map(gpu.launch, devices)))


def with_issue_rates(host: Host, before: IssueRates, after: IssueRates) -> Host:
    """Return the host with the least of its rates and those before and after a run."""
    rates = host.rates
    gpus = tuple(
        replace(one, operator=operator, launch=launch)
        for one, operator, launch in zip(
            rates.gpus,
            map(_least, [one.operator for one in rates.gpus], before.operators, after.operators),
            map(_least, [one.launch for one in rates.gpus], before.launches, after.launches),
            strict=True,
        )
    )
    processor = replace(rates.cpu, operator=_least(rates.cpu.operator, before.cpu, after.cpu))
    return replace(host, described=replace(rates, cpu=processor, gpus=gpus))


def _least(*figures: Figure) -> Figure:
    return min(figures, key=lambda figure: figure.median)
