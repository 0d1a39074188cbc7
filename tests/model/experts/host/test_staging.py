"""States on their way between a GPU and the host: the rows, and their gradients, arrive as they left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ktc.model.experts.host.staging import parts, pinned, to_device, to_host

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def pieces(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(count, 5, generator=generator, dtype=torch.float64).to(device) for count in (3, 0, 4)]
    return [piece.requires_grad_() for piece in made]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_all_pieces_reach_the_host_in_their_order(device: str) -> None:
    given = pieces(device)
    host = to_host(given)
    assert host.device.type == "cpu"
    assert torch.equal(host, torch.cat([piece.detach().cpu() for piece in given]))
    assert host.is_pinned() == (device != "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_come_back_to_where_the_pieces_are(device: str) -> None:
    given = pieces(device)
    weight = torch.arange(35, dtype=torch.float64).view(7, 5)
    back = to_host([to_device(part, torch.device(device)) for part in to_host(given).split([2, 5])])
    (back * weight).sum().backward()
    assert torch.equal(torch.cat([piece.grad.cpu() for piece in given if piece.grad is not None]), weight)
    assert all(piece.grad is not None and piece.grad.device == piece.device for piece in given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_rows_are_the_rows_and_pass_gradients_on() -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    there = pinned(rows)
    assert there.is_pinned()
    assert torch.equal(there, rows)
    there.sum().backward()
    assert torch.equal(rows.grad, torch.ones(4, 3))


@pytest.mark.parametrize(
    "pin", [False, pytest.param(True, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def test_parts_are_the_rows_and_their_gradients_meet(pin: bool) -> None:
    rows = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    first, second, third = parts(rows, [2, 4, 1], pin=pin)
    assert torch.equal(torch.cat((first, second, third)), rows)
    assert first.is_pinned() == pin
    (2 * first.sum() + (second * second).sum()).backward()
    wanted = torch.cat((torch.full((2, 3), 2.0), 2 * rows.detach()[2:6], torch.zeros(1, 3)))
    assert torch.equal(rows.grad, wanted)


def test_a_piece_alone_in_host_memory_is_not_copied() -> None:
    (rows, *_) = pieces("cpu")
    assert to_host([rows]) is rows
    assert to_device(rows, torch.device("cpu")) is rows
