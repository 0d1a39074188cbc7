"""From how many tokens on a plan divides the experts of a call among three engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktc.foundation.rates import CpuRates, Figure, GpuRates, Rates
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.targets.target import Prefill
from ktc.stages.plan.divided import with_division

V2_LITE = FusedMoeSpec("fused_moe", 2048, 1408, 64, 6, "bf16", "bf16", "bf16", "amx")


def machine(operator: float, bus: float = 50e9) -> Rates:
    read, products, zero = {16: Figure(90e9)}, {"bf16": {16: Figure(9e12)}}, Figure(0.0)
    cpu = CpuRates(products, read, read[16], zero, zero, zero, zero)
    names = ("grouped", "attention", "latent_attention", "bandwidth", "bus", "launch", "graph_node", "host_node")
    gpu = GpuRates(
        {}, context=0, bus_beside_cpu=Figure(bus), cpu_beside_bus=Figure(80e9), operator=Figure(operator),
        **dict.fromkeys(names, zero),
    )  # fmt: skip
    return Rates(cpu, (gpu,), zero)


def planned(rates: Rates, tokens: int = 1024) -> Prefill:
    return with_division(Prefill(("cuda:0",), tokens, 1 << 30, kept=0, share=0.38), V2_LITE, rates)


def test_calls_are_divided_from_the_number_of_tokens_on_that_pays_for_what_python_does() -> None:
    at_once = planned(machine(10e-6))
    assert at_once.divided == 17
    assert at_once.crowded == pytest.approx(9e12 / 80e9, rel=0.1), "two FLOPs for the two bytes of a weight"
    assert planned(machine(26e-6)).divided == 34
    assert planned(machine(1.0)).divided == 0
    assert planned(machine(10e-6), tokens=16).divided == 0, "such calls are sent whole"


def test_kept_experts_make_it_pay_earlier() -> None:
    slow = machine(26e-6)
    few = planned(slow)
    assert with_division(replace(few, kept=32, divided=0), V2_LITE, slow).divided == 17 < few.divided
