"""Factors in host memory are those of their pass, whatever happens between passes; gradients are added once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ktc.model.experts.trained import host_factors
from ktc.model.experts.trained.host_factors import add_gradients, norm_of, on_device, one_pass, parameters_on_host
from ktc.model.experts.trained.lora import ExpertsLora, Lora

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a use have the values of the time when it was sent, as on a GPU."""

    def send(_: object, use: host_factors._Use) -> host_factors._Sent:
        return host_factors._Sent(tuple(factor if factor is None else factor.clone() for factor in use.factors), None)

    monkeypatch.setattr(host_factors._Sender, "_send", send)
    yield
    host_factors.forget()


def layer(value: float) -> ExpertsLora:
    a, b = nn.Parameter(torch.full((4, 3), value)), nn.Parameter(torch.full((5, 4), value))
    return ExpertsLora(down=Lora(a.view(2, 2, 3), b.view(5, 2, 2).permute(2, 0, 1), 1.0, (a, b), (1.0,)))


def values(layers: list[ExpertsLora], order: str) -> list[float]:
    """Use layers in an order such as "F0 F1 B1 B0"; return what each use reads."""
    read: list[float] = []
    for use in order.split():
        lora = on_device(layers[int(use[1:])], CPU, in_backward=use[0] == "B")
        assert lora.down is not None
        read.append(float(lora.down.a.flatten()[0]))
    return read


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "passes",
    [
        ("F B", "F B", "F B"),
        ("F", "F", "F"),
        ("F", "F B", "F", "F B"),
        ("FB", "FB", "FB"),
        ("F F B B", "F B", "F F B B"),
    ],
)
def test_a_use_never_reads_values_of_an_earlier_pass(count: int, passes: tuple[str, ...]) -> None:
    layers = [layer(0.0) for _ in range(count)]
    numbers = range(count)
    parts = {
        "F": " ".join(f"F{number}" for number in numbers),
        "B": " ".join(f"B{number}" for number in reversed(numbers)),
        "FB": " ".join(f"F{number} B{number}" for number in reversed(numbers)),
    }
    for step, one in enumerate(passes, 1):
        for lora in layers:
            assert lora.down is not None
            for parameter in lora.down.parameters:
                parameter.data.fill_(step)  # which no version counts
        with one_pass():
            order = " ".join(parts[part] for part in one.split())
            assert values(layers, order) == [step] * len(order.split())


def test_they_are_used_inside_of_a_pass_alone() -> None:
    with one_pass():
        assert parameters_on_host(layer(1.0)) is None, "nothing is page-locked here"
    assert parameters_on_host(layer(1.0)) is None


def test_gradients_are_added_in_the_layout_of_their_parameters() -> None:
    lora = layer(1.0)
    assert lora.down is not None
    factors = lora.factors
    parameters: tuple[Tensor | None, ...] = (None, None, *lora.down.parameters)
    wanted = [torch.randn(factor.shape) for factor in factors if factor is not None]
    for times in (1, 2):
        add_gradients(parameters, factors, (None, None, *wanted))
        a, b = lora.down.parameters
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.view(2, 2, 3), times * wanted[0])
        torch.testing.assert_close(b.grad.view(5, 2, 2).permute(2, 0, 1), times * wanted[1])


def test_the_norm_of_a_gradient_is_known_until_others_change_it() -> None:
    lora = layer(1.0)
    assert lora.down is not None
    parameters: tuple[Tensor | None, ...] = (None, None, *lora.down.parameters)
    given = [torch.randn(factor.shape) for factor in lora.factors if factor is not None]
    for times in (1, 2):
        add_gradients(parameters, lora.factors, (None, None, *given))
        for parameter, values in zip(lora.down.parameters, given, strict=True):
            assert parameter.grad is not None
            norm = norm_of(parameter.grad)
            assert norm is not None
            torch.testing.assert_close(norm, times * values.norm())
    changed, stays = (parameter.grad for parameter in lora.down.parameters)
    assert changed is not None
    assert stays is not None
    changed.mul_(2)
    assert norm_of(changed) is None
    assert norm_of(stays) is not None
    assert norm_of(stays.clone()) is None
