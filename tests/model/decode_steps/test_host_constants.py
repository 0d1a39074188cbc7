"""What a step copies from the CPU: noted in a step before the capture, and given by copies of the device in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ktc.model import twin
from ktc.model.decode_steps import host_constants
from ktc.model.decode_steps.host_constants import GivenConstants, HostConstant, NotedConstants

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "to a device": lambda x: x.expand(2, 3).to("meta"),
    "to a device and a dtype": lambda x: x.to(dtype=torch.float64, device=torch.device("meta")),
    "to where another tensor is": lambda x: x.to(torch.empty(1, device="meta")),
    "into a tensor": lambda x: torch.empty(3, device="meta").copy_(x),
    "of numbers": lambda x: torch.tensor([1.0, 2.0], device="meta"),
}


class NoCopies(TorchDispatchMode):
    """Refuse operations that copy a tensor of the CPU to another device, as a capture does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copied = isinstance(result, Tensor) and result.device.type == "meta"
        assert not copied or not any(isinstance(x, Tensor) and x.device.type == "cpu" for x in args), func
        return result


@pytest.mark.parametrize("name", COPIES)
def test_a_capture_reads_what_the_step_before_it_copied(name: str) -> None:
    copy = COPIES[name]
    constants = list[HostConstant]()
    with NotedConstants(constants):
        wanted = copy(torch.arange(3.0))
    with GivenConstants(constants), NoCopies():
        given = copy(torch.arange(3.0))
    assert given is not constants[0].copy, "code may write to it"
    assert (given.dtype, given.shape, given.device) == (wanted.dtype, wanted.shape, wanted.device)


@pytest.mark.parametrize("second", [torch.ones(3), torch.arange(3), torch.zeros(4)], ids=["values", "dtype", "shape"])
def test_a_tensor_that_changes_from_step_to_step_is_not_captured(second: Tensor) -> None:
    constants = list[HostConstant]()
    with NotedConstants(constants):
        torch.zeros(3).to("meta")
    with GivenConstants(constants), pytest.raises(RuntimeError, match="not the same in all steps"):
        second.to("meta")
    with GivenConstants([]), pytest.raises(RuntimeError, match="not the same in all steps"):
        second.to("meta")


def test_tensors_that_stay_or_are_large_are_no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_constants, "_MOST", 16)
    constants = list[HostConstant]()
    with NotedConstants(constants):
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.ones(2).to("cpu").device.type == "cpu"
        assert torch.ones(2).to(torch.ones(1)).sum() == 2
        assert torch.ones(2, device="meta").to("meta").shape == (2,)
        assert torch.ones(5).to("meta").shape == (5,)
        assert torch.tensor([1, 2]).tolist() == [1, 2]
    assert not constants


def test_positions_of_phimoe_are_constants() -> None:
    """Its code computes their frequencies on the CPU in each step."""
    config = twin.shrink(twin.default_config("phimoe"))
    rotary: Any = type(cast("Any", twin.build(config, 7, torch.float32, "cpu")).model.rotary_emb)(config)
    x, positions = torch.empty(1, 1, 8, device="meta"), torch.empty(1, 1, dtype=torch.int64, device="meta")
    constants = list[HostConstant]()
    with NotedConstants(constants):
        rotary(x, positions)
    with GivenConstants(constants), NoCopies():
        cos, sin = rotary(x, positions)
    assert constants and cos.device.type == sin.device.type == "meta"
