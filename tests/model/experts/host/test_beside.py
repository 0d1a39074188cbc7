"""Work beside a model's: it is joined before the first operation that needs its result, and not earlier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import LastMoment
from torch import Tensor, nn

from ktc.model.experts.host.beside import Beside


def test_views_and_other_work_do_not_wait() -> None:
    lane, out = LastMoment(), torch.zeros(2, 3)
    beside = Beside(lane)
    with beside.entered():
        beside.start(out, lambda: out.fill_(1))
        seen = out.view(3, 2).transpose(0, 1)[:1]
        assert float((torch.ones(4) * 2).sum()) == 8
        assert lane.joined == 0
        assert torch.equal(seen + 1, torch.full((1, 3), 2.0))
        assert lane.joined == 1


def _copied(out: Tensor) -> Tensor:
    return out.reshape(-1).clone()


def _multiplied(out: Tensor) -> Tensor:
    return out.t() @ out


def _written(out: Tensor) -> Tensor:
    return out.add_(1)


@pytest.mark.parametrize("use", [_copied, _multiplied, _written])
def test_the_first_use_waits(use: Callable[[Tensor], Tensor]) -> None:
    lane, out = LastMoment(), torch.zeros(2, 3)
    beside = Beside(lane)
    with torch.inference_mode(), beside.entered():
        beside.start(out, lambda: out.copy_(torch.ones(2, 3)))
        found = use(out)
    assert lane.joined == 1 and torch.equal(found, use(torch.ones(2, 3)))


def test_a_module_waits_for_its_inputs() -> None:
    lane, out = LastMoment(), torch.zeros(2)

    class Unseen(nn.Module):
        """Would start a kernel of its own on `x`."""

        def forward(self, x: Tensor) -> int:
            return lane.joined

    beside = Beside(lane)
    with beside.entered():
        beside.start(out, lambda: None)
        assert Unseen()(torch.ones(1)) == 0
        assert Unseen()(out[:1]) == 1


def test_work_is_joined_by_more_work_and_at_the_end() -> None:
    lane, out = LastMoment(), torch.zeros(2)
    beside = Beside(lane)
    with beside.entered():
        beside.start(out, lambda: out.fill_(1))
        other = torch.zeros(2)
        beside.start(other, lambda: other.fill_(2))
        assert lane.joined == 1
    assert lane.joined == 2 and out.tolist() == [1, 1] and other.tolist() == [2, 2]


class AtOnce(LastMoment):
    """A stream that takes its work when it starts, as one of a GPU does, where it may still be running afterwards."""

    def start(self, device: torch.device, work: Callable[[], object]) -> None:
        work()
        super().start(device, lambda: None)


def test_work_does_not_wait_for_itself() -> None:
    lane, out = AtOnce(), torch.zeros(2)
    beside = Beside(lane)
    with beside.entered():
        beside.start(out, lambda: out.copy_(torch.ones(2)))
        assert lane.joined == 0
        assert (out + 1).tolist() == [2, 2]
        assert lane.joined == 1


def test_an_error_waits_for_the_work() -> None:
    lane, out = LastMoment(), torch.zeros(2)
    beside = Beside(lane)
    with pytest.raises(ZeroDivisionError), beside.entered():
        beside.start(out, lambda: out.fill_(1))
        raise ZeroDivisionError
    assert lane.joined == 1 and out.tolist() == [1, 1]
    with beside.entered():
        assert (out + 1).tolist() == [2, 2]
    assert lane.joined == 1


def test_modules_of_other_threads_do_not_wait() -> None:
    lane, out = LastMoment(), torch.zeros(2)
    beside, layer = Beside(lane), nn.Identity()
    with beside.entered():
        beside.start(out, lambda: None)
        other = threading.Thread(target=layer, args=(out,))
        other.start()
        other.join()
        assert lane.joined == 0


def test_functions_are_compiled_as_elsewhere() -> None:
    compiled: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    with Beside(LastMoment()).entered():
        assert double(torch.ones(2)).tolist() == [2, 2]
    assert compiled
