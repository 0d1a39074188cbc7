"""Verdicts of rows: errors that are not finite, choices that were not seen, experts by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ktc.inference.prove.compare import UNSEEN, Output, compare, compare_experts, same_choices
from ktc.inference.prove.report import Row
from ktc.inference.prove.sides import Sides
from ktc.model.compare.feed import Tokens

TOKENS = Tokens(torch.arange(6)[None], "random tokens, seed 0", ())
WANTED = torch.ones(6, 8)
CHOICES = (torch.tensor([[0, 1]] * 6),)


def row(ktc: Tensor, stock: Tensor, wanted: Tensor = WANTED) -> Row:
    return compare("mlp", "block", True, Sides(Output(wanted), Output(stock), Output(ktc)), TOKENS)


def routed(ktc: tuple[Tensor, ...], stock: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> Row:
    sides = (Output(WANTED, choices) for choices in (wanted, stock, ktc))
    return compare("mlp", "block", True, Sides(*sides), TOKENS)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_a_finite_error_is_red(value: float) -> None:
    broken = WANTED.clone()
    broken[2, 3] = value
    assert row(broken, WANTED).red == "the result is not finite"
    assert row(broken, broken).red == "the result is not finite on either side"
    assert row(2 * WANTED, broken).red.startswith("error 1.0e+00 has no bound")
    assert row(WANTED, WANTED, broken).red
    assert not row(WANTED, WANTED).red


def test_an_expert_without_a_finite_error_is_red_by_its_number() -> None:
    numbers, wanted = torch.arange(3).repeat(2), torch.ones(6, 8)
    broken = wanted.clone()
    broken[1] = math.inf
    for ktc, stock in ((broken, wanted), (broken, broken), (wanted, broken)):
        found = compare_experts("mlp.experts", Sides(wanted, stock, ktc), numbers)
        assert found.red.endswith("expert 1 of 3")
        assert [worst.index for worst in found.worst] == [1]


def test_the_reason_is_that_of_a_wrong_expert() -> None:
    """Expert 0 has the larger ratio and is within its bound, expert 1 is not."""
    numbers, wanted = torch.tensor([0, 1]), torch.ones(2, 8)
    errors = torch.tensor([[1.9, 1.0], [2.3e-5, 1e-6]])
    found = compare_experts("experts", Sides(wanted, wanted + errors[:, 1:], wanted + errors[:, :1]), numbers)
    assert found.red.startswith("error 2.3e-05 is")
    assert found.red.endswith("expert 1 of 2")


def test_one_wrong_output_of_thousands_is_red() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers, wanted = torch.arange(3), torch.randn(3, 4096, generator=generator)
    stock, ktc = (wanted * (1 + 3e-3 * torch.randn(3, 4096, generator=generator)) for _ in range(2))
    assert not compare_experts("experts", Sides(wanted, stock, ktc), numbers).red
    ktc[2, 77] += 0.2
    found = compare_experts("experts", Sides(wanted, stock, ktc), numbers)
    assert found.ktc is not None
    assert found.ktc < 2 * (found.stock or 0)
    assert found.red == "an output is wrong by more than any of stock: expert 2 of 3"


def test_choices_that_were_not_seen_do_not_pass() -> None:
    assert routed((), CHOICES, CHOICES).red == "its choices of experts were not seen, those of stock were"
    assert routed(CHOICES, (), CHOICES).red == ""
    unseen = routed(CHOICES, (), ())
    assert (unseen.red, unseen.note) == ("", UNSEEN)
    assert routed((), (), ()).note == ""


def test_another_number_of_experts_is_another_choice() -> None:
    more = (torch.tensor([[0, 1, 2]] * 6),)
    same = same_choices(Output(WANTED, more), Output(WANTED, CHOICES))
    assert same is not None
    assert not same.any()
    assert routed(more, CHOICES, CHOICES).red == "6 of 6 tokens chose other experts, with stock 0"
