"""Works in one use -> the bytes that cross each link: weights that are sent, and hidden states with their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ktc.stages.cost.amounts import Amounts
from ktc.stages.cost.types import Work

_HOST = "cpu"  # the host's memory, and the CPU


def traffic_of(works: Sequence[Work], amounts: Amounts) -> Mapping[tuple[str, str], float]:
    """Return the bytes between two devices, the smaller name first, in both directions together."""
    total = defaultdict[tuple[str, str], float](float)
    stands = next((work.device for work in works if work.kind == "norms"), _HOST)  # the device of the hidden state
    for work in works:
        if work.kind == "norms":
            total[_link(stands, work.device)] += states(work, amounts)
            stands = work.device
        for link, nbytes in _of_work(work, stands, amounts):
            total[link] += nbytes
    return {link: nbytes for link, nbytes in total.items() if nbytes and link[0] != link[1]}


def _of_work(work: Work, stands: str, amounts: Amounts) -> Iterator[tuple[tuple[str, str], float]]:
    if work.experts is None:
        yield _link(_HOST, work.device), amounts.passes * work.streamed
        if work.kind in ("attention", "mlp"):
            yield _link(stands, work.device), 2 * states(work, amounts)
        return
    experts, use = work.experts, amounts.use
    devices = experts.sent_to(use.tokens) or (work.device,)
    if (read := experts.engines(use)) is not None:
        yield _link(_HOST, experts.devices[0]), read[1] * work.weights / experts.count
    for device in devices:
        yield _link(stands, device), 2 * states(work, amounts)
        if work.packed and device != _HOST and not work.experts.resident:
            yield _link(_HOST, device), amounts.passes * work.weights * (1 - work.experts.kept) / len(devices)


def states(work: Work, amounts: Amounts) -> float:
    """Return the bytes of hidden states in one direction, and of their gradients in the other."""
    return (1 + amounts.again + amounts.use.trains) * amounts.use.tokens * work.hidden


def _link(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one <= other else (other, one)
