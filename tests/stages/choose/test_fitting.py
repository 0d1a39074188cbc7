"""A plan over its budget says what would fit: budgets, and formats with their bytes and their cost."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from families import CPU, full_size

from ktc.foundation.host import Gpu, Host
from ktc.language import dsl
from ktc.stages.choose import FORMAT, Chosen, choose_plan, with_ways_out
from ktc.stages.choose.fitting import COSTS, needed_bytes
from ktc.stages.match import match

GIB = 1 << 30


def chosen(host: Host, **settings: str) -> Chosen:
    model, rules = full_size("qwen3-30b-a3b"), dsl.load("auto", settings)
    plan = choose_plan(model, (), match(model, rules, host), rules, host)
    return with_ways_out(plan, rules, lambda name: chosen(host, **{**settings, FORMAT: name}))


def hint(plan: Chosen) -> str:
    (problem,) = plan.plan.over_budget
    assert problem.code == "M070"
    return problem.hint


def test_the_smallest_budget_works_and_one_byte_less_does_not() -> None:
    small = replace(CPU, memory=32 * GIB)
    plan = chosen(small, use="generate")
    size = needed_bytes(plan.plan)["cpu"]
    assert f"`cpu = {size / GIB:.1f} GiB`, with batch 1 and length 2048" in hint(plan)
    for budget, short in ((size, False), (size - 1, True)):
        rules = replace(dsl.load("auto", {"use": "generate"}), plan={"mode": "generate", "cpu": budget})
        model = full_size("qwen3-30b-a3b")
        uses = choose_plan(model, (), match(model, rules, small), rules, small).plan.memory.workloads
        assert bool(uses[-1].shortfall) == short


@pytest.mark.parametrize(
    "host", [replace(CPU, memory=40 * GIB), replace(CPU, memory=40 * GIB, gpus=(Gpu("a", 12 * GIB),))]
)
def test_formats_that_fit_are_named_with_their_bytes_and_their_cost(host: Host) -> None:
    words = hint(chosen(host, use="generate"))
    sizes = [float(size) for size in re.findall(r"=int\d` fits with .*?([\d.]+) GiB on `cpu`", words)]
    assert len(sizes) == 2
    assert sizes[0] > sizes[1]
    assert all(cost in words for cost in COSTS.values())
    assert words.endswith("docs/details/quantisation.md has the measurements")


def test_a_format_that_is_too_large_too_says_so_and_no_coarser_one_is_left_out() -> None:
    tiny = replace(CPU, memory=8 * GIB)
    assert hint(chosen(tiny, use="generate")).count("still does not fit") == 2
    coarser = hint(chosen(tiny, use="generate", format="int8"))
    assert "format=int8" not in coarser
    assert "format=int4" in coarser
    assert "--set" not in hint(chosen(tiny, use="generate", format="int4"))


def test_a_format_that_leaves_too_little_for_the_input_is_not_said_to_fit() -> None:
    words = hint(chosen(replace(CPU, memory=22 * GIB), use="train"))
    assert "`--set format=int4` leaves too little for batch 1 and length 2048, and needs in all" in words
    assert "`--set format=int4` fits" not in words
