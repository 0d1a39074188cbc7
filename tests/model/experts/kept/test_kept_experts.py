"""Single experts that a GPU keeps for decoding: by address, split with the CPU, and exchanged between steps.

Without a GPU, Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from kernel_layers import ISAS, Load, error, quick_or_slow, random_layer, spec_of
from recorded_steps import LastMoment, call_at_once
from stored_experts import in_blocks, stored_experts
from torch import Tensor

from ktc.diagnostics import HostLacks
from ktc.foundation.formats import WeightFormat
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.gpu import kept_kernels
from ktc.model.experts.host import page_lock
from ktc.model.experts.host.host_node import HostNodes
from ktc.model.experts.kept import kept_experts, kept_policy
from ktc.model.experts.kept.kept_division import CALL, lead_of, least_of
from ktc.model.experts.kept.kept_experts import MEASURED, PERIOD, KeptExperts, can_keep
from ktc.model.experts.kept.kept_policy import (
    DECAY,
    CallSums,
    CpuLine,
    Exchange,
    exchanges,
    first_kept,
    measured_line,
    no_slower,
    planned_line,
    share_beside,
)  # fmt: skip
from ktc.model.experts.layouts.coded_matrices import addressed_codes
from ktc.model.experts.layouts.panel_codes import MOST_PARTS, Cuts, cuts_of
from ktc.model.experts.layouts.panels import panels_of
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.products.coded_check import check_addressed
from ktc.model.experts.references import kept_split
from ktc.model.experts.references.kept_split import COMPUTED_ELSEWHERE, FIRST_UNIT_BIT, WHOLE_SHARE
from ktc.model.experts.streamed.expert_stream import renew_streams
from ktc.model.experts.streamed.stream_ring import ring_of
from ktc.model.experts.streamed.stream_sizes import ring_bytes
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BOUND = 0.01
BOUND_INT8 = 0.02  # the CPU's kernel rounds rows of activations to int8, and a GPU multiplies them as they are
FORMATS = [spec_of(ISAS[0]), in_blocks("q4_0", "q8_0"), spec_of(ISAS[0], codes=("int4", 32)),
           spec_of(ISAS[0], "bf16", "silu biased", codes=("int4", 32)), spec_of(ISAS[0], codes=("fp8", 128)),
           in_blocks("q4_1", "mxfp4"), in_blocks("q4_k", "q6_k"), in_blocks("q5_k", "nvfp4"),
           in_blocks("uint4_g32", "uint4_g128"), spec_of(ISAS[0], codes=("int8", 0))]  # fmt: skip
QUICK = FORMATS[:2]


def kept_by(module: FusedMoe, places: int, share: float = 0.5, *, fixed: bool = False) -> KeptExperts:
    assert module.weights.packed is not None and can_keep(module.weights.packed, DEVICE)
    store = KeptExperts([(module.weights.packed, module.form)], DEVICE, places, share=share, fixed=fixed)
    module.kept = store.layers[0]
    return store


def split_call(module: FusedMoe, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what a recorded step computes, with the CPU's part done at the last moment."""
    nodes = HostNodes(None if DEVICE.type == "cuda" else call_at_once, None if DEVICE.type == "cuda" else LastMoment())
    with torch.no_grad(), nodes.recorded(module.step_context):
        computed = module(x.to(DEVICE), index.to(DEVICE), weights.to(DEVICE)).clone()
    computed = computed.cpu()
    nodes.check(lambda _: "")
    return computed


def test_the_kernel_and_its_reference_split_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, top_k, experts in ((1, 2, 5), (3, 4, 9), (16, 6, 64)):
        rows = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
        index, numbers = torch.stack(rows).to(DEVICE), torch.arange(experts)
        index[0, 0] = experts + 1 if tokens > 1 else -1  # no expert's
        table = torch.where(torch.rand(experts, generator=generator) < 0.4, numbers * 64 + 4096, 0).to(DEVICE)
        for part, cuts in itertools.product((0, WHOLE_SHARE // 3, WHOLE_SHARE), (Cuts(90, 90), Cuts(90, 32))):
            results = list[tuple[Tensor, ...]]()
            for module in (kept_kernels, kept_split):
                more = WHOLE_SHARE // 3 if part else 0, WHOLE_SHARE // 2 if cuts.parts > 1 else 0
                share = torch.tensor([part, *more], dtype=torch.int32, device=DEVICE)
                counts = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
                traffic = torch.zeros(3, dtype=torch.int64, device=DEVICE)
                results.append(
                    (*module.split(index, table, share, counts, traffic, (1 << 40, 64), cuts), counts, traffic)
                )
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other)
            addresses, left, counts, traffic = results[0]
            assert int(traffic.sum()) == 90 * int(counts.sum()) == 90 * (len(index.unique()) - 1)
            is_whole = (addresses != 0) & (addresses % MOST_PARTS == 0)
            assert torch.equal(left.flatten() == COMPUTED_ELSEWHERE, is_whole)


def last_of_both(sent: int, misses: int, bus: float, cpu: float, call: float = 0.0) -> float:
    return max(sent / bus, call * (sent < misses) + (misses - sent) / cpu)


def sent_by(misses: int, share: float, lead: float = 0.0, parts: int = 1, least: float = 0.0) -> int:
    numbers = torch.tensor([round(part * WHOLE_SHARE) for part in (share, lead, least)], dtype=torch.int32)
    return int(kept_split.over_bus(torch.tensor(misses), numbers, parts))


@pytest.mark.parametrize(("bus", "cpu"), [(50.0, 66.0), (47.0, 84.0), (25.0, 140.0), (50.0, 20.0)])
def test_bus_and_cpu_end_as_early_as_whole_experts_allow(bus: float, cpu: float) -> None:
    for misses in range(65):
        times = [last_of_both(sent, misses, bus, cpu) for sent in range(misses + 1)]
        ours = sent_by(misses, bus / (bus + cpu))
        assert times[ours] <= min(times) * 1.001, f"{ours} of {misses}"
    assert sent_by(5, 0.0) == 0 and sent_by(5, 1.0) == 5


@pytest.mark.parametrize("megabytes", [0.8, 2.65, 17.3])
@pytest.mark.parametrize(("bus", "cpu"), [(47.0, 102.0), (25.0, 140.0), (50.0, 20.0)])
def test_what_a_call_costs_the_cpu_decides_with_the_bytes(bus: float, cpu: float, megabytes: float) -> None:
    share, lead = bus / (bus + cpu), lead_of(bus / (bus + cpu), bus * 1e9, megabytes * 1e6)
    per_expert = megabytes * 1e6 / 1e9
    for misses in range(33):
        times = [last_of_both(sent, misses, bus / per_expert, cpu / per_expert, CALL) for sent in range(misses + 1)]
        ours = sent_by(misses, share, lead)
        assert times[ours] <= min(times) * 1.001, f"{ours} of {misses}"
    assert sent_by(1, share, lead) == (per_expert / bus <= per_expert / cpu + CALL)
    assert lead_of(0.0, 0.0, 1e6) == 0.0, "no bus"


def calls_of(line: CpuLine, sizes: Sequence[float], factors: Sequence[float]) -> CallSums:
    """Return the sums over calls that take what `line` says, times a factor."""
    times = [factor * (line.call + size * line.per_byte) for size, factor in zip(sizes, factors, strict=True)]
    products = sum(size * time for size, time in zip(sizes, times, strict=True))
    return CallSums(len(sizes), sum(sizes), sum(times), sum(size**2 for size in sizes), products)


def test_the_time_of_a_call_is_told_from_that_of_its_bytes() -> None:
    true, plan, expert = CpuLine(130e-6, 2e-11), CpuLine(CALL, 1e-11), 13.2e6
    sizes = [expert * part / 15 for part in range(3, 40)]
    line = measured_line(calls_of(true, sizes * 10, [1.0] * 370), plan, expert)
    assert tuple(line) == pytest.approx(tuple(true), rel=0.1)
    assert tuple(measured_line(CallSums(), plan, expert)) == pytest.approx(tuple(plan))
    equal = measured_line(calls_of(true, [expert] * 200, [1.0] * 200), plan, expert)
    assert equal.call + expert * equal.per_byte == pytest.approx(true.call + expert * true.per_byte, rel=0.05)
    idle = calls_of(true, sizes, [1.0] * 37)
    for _ in range(40):
        idle = idle.followed_by(CallSums())
    tried = measured_line(idle, plan, expert)
    assert tuple(tried) == pytest.approx(tuple(plan), rel=0.01), "a CPU without calls is tried again"
    assert share_beside(plan, 0.0) == 0.0, "no bus"
    assert share_beside(planned_line(0.37, 5e10), 5e10) == pytest.approx(0.37)


def test_first_calls_that_take_a_second_are_forgotten_after_some_steps() -> None:
    plan, expert = CpuLine(CALL, 1.3e-11), 13.2e6
    sums = no_slower(calls_of(plan, [expert] * 24, [1.0] * 23 + [5000.0]), plan)
    assert sums.seconds <= 30 * 24 * (CALL + expert * plan.per_byte) * 1.001
    for _ in range(8):
        sums = sums.followed_by(no_slower(calls_of(plan, [expert, expert / 2] * 12, [1.0] * 24), plan))
    line = measured_line(sums, plan, expert)
    assert line.call + expert * line.per_byte == pytest.approx(plan.call + expert * plan.per_byte, rel=0.1)


class Machine(NamedTuple):
    """A model's layers whose steps miss some of `chosen` experts; seconds of an expert on the bus and on the CPU."""

    layers: int
    chosen: int
    parts: int
    bus: float
    cpu: float


def simulated(machine: Machine, phases: Sequence[tuple[int, float, float]], parts: int) -> list[float]:
    """Return the mean step of phases: a number of steps, what a call costs in them, and how much slower the CPU is."""
    generator, nbytes = torch.Generator().manual_seed(0), 1e7
    alone = nbytes / machine.bus / kept_policy.BESIDE
    plan = planned_line(machine.cpu / (machine.cpu + machine.bus), alone)
    line, sums, means, new = plan, CallSums(), list[float](), CallSums()
    for steps, call, slower in phases:
        total = 0.0
        for step in range(steps):
            misses = (torch.rand(machine.layers, machine.chosen, generator=generator) < 0.48).sum(1)
            share = share_beside(line, alone)
            about = share, kept_policy.BESIDE * alone, nbytes, line.call
            numbers = torch.tensor([round(part * WHOLE_SHARE) for part in (share, lead_of(*about), least_of(*about))])
            sent = kept_split.over_bus(misses, numbers, parts)
            rest = (misses * parts - sent).double() / parts
            noise = torch.empty(machine.layers).uniform_(0.9, 1.15, generator=generator)
            times = torch.where(rest > 0, (call + rest * machine.cpu * slower) * noise, 0.0)
            total += float(torch.maximum(times, sent * machine.bus / parts).sum())
            of_step = int((rest > 0).sum()), rest * nbytes
            squares, products = (of_step[1] ** 2).sum(), (of_step[1] * times).sum()
            more = of_step[0], float(of_step[1].sum()), float(times.sum()), float(squares), float(products)
            new = CallSums(*(one + other for one, other in zip(new, more, strict=True)))
            if step % MEASURED == 0:
                sums, new = sums.followed_by(new), CallSums()
                line = measured_line(sums, plan, nbytes)
        means.append(total / steps)
    return means


@pytest.mark.parametrize(
    "machine", [Machine(24, 4, 15, 260e-6, 171e-6), Machine(48, 8, 12, 52e-6, 36e-6)], ids=["gpt-oss", "qwen3"]
)
def test_shares_follow_slow_calls_and_come_back(machine: Machine) -> None:
    phases = [(200, CALL, 1.0), (200, CALL + 1e-4, 1.0), (300, 10 * CALL, 10.0), (300, CALL, 1.0)]
    divided, whole = simulated(machine, phases, machine.parts), simulated(machine, phases, 1)
    assert all(one <= 1.03 * other for one, other in zip(divided, whole, strict=True))
    assert divided[0] <= 0.95 * whole[0]
    assert divided[3] <= 1.15 * divided[0], "the time to come back included"
    again = simulated(
        machine, [(200, CALL, 1.0), (300, 10 * CALL, 10.0), (200, CALL, 1.0), (200, CALL, 1.0)], machine.parts
    )
    assert again[3] <= 1.03 * again[0]


def test_the_first_of_the_others_by_number_go_over_the_bus() -> None:
    index, table = torch.tensor([[7, 2, 5, 4]]), torch.zeros(8, dtype=torch.int64)
    table[5] = 11 << 4
    share = torch.tensor([WHOLE_SHARE // 2, 0, 0], dtype=torch.int32)
    rest = share, torch.zeros(8), torch.zeros(3, dtype=torch.int64)
    addresses, left = kept_split.split(index, table, *rest, (1024, 16), Cuts(90, 90))
    assert addresses.tolist() == [0, 1056, 176, 1088] and left.tolist() == [[7, -1, -1, -1]]


def test_one_expert_is_divided_after_those_that_the_bus_reads_whole() -> None:
    index, table = torch.tensor([[7, 2], [4, 7], [4, 2]]), torch.zeros(8, dtype=torch.int64)
    share = torch.tensor([WHOLE_SHARE // 2, 0, 0], dtype=torch.int32)
    counts, traffic = torch.zeros(8), torch.zeros(3, dtype=torch.int64)
    addresses, left = kept_split.split(index, table, share, counts, traffic, (1024, 16), Cuts(90, 32))
    divided = 1024 + 4 * 16 + 2  # of nine parts five
    assert addresses.tolist() == [0, 1056, divided, 0, divided, 1056]
    assert left.tolist() == [[7, -1], [4 + (64 << FIRST_UNIT_BIT), 7], [4 + (64 << FIRST_UNIT_BIT), -1]]
    assert traffic.tolist() == [0, 90 + 64, 90 - 64 + 90]


@pytest.mark.parametrize("megabytes", [2.65, 13.2])
@pytest.mark.parametrize(("bus", "cpu"), [(47.0, 102.0), (25.0, 140.0), (50.0, 20.0)])
def test_bus_and_cpu_end_as_early_as_parts_of_an_expert_allow(bus: float, cpu: float, megabytes: float) -> None:
    share, lead, parts = bus / (bus + cpu), lead_of(bus / (bus + cpu), bus * 1e9, megabytes * 1e6), 15
    of_part = megabytes * 1e6 / 1e9 / parts
    for misses in range(9):
        times = [last_of_both(n, misses * parts, bus / of_part, cpu / of_part, CALL) for n in range(misses * parts + 1)]
        assert times[sent_by(misses, share, lead, parts)] <= min(times) * 1.002
        whole = times[parts * sent_by(misses, share, lead)]
        assert min(times) <= whole


def test_the_cpu_reads_nothing_rather_than_less_than_the_least() -> None:
    assert sent_by(2, 0.6, parts=15) == 18 and sent_by(2, 0.6, parts=15, least=0.79) == 18
    assert sent_by(2, 0.6, parts=15, least=0.85) == 30
    assert least_of(0.3, 50e9, 13.2e6) == pytest.approx(CALL / 8 * 50e9 / 13.2e6) and least_of(0.0, 0.0, 1e6) == 0


def test_experts_are_cut_where_panels_and_scales_begin() -> None:
    def cuts(units: int, stored: WeightFormat, group: int = 0) -> Cuts:
        return cuts_of(units, addressed_codes(panels_of(stored, group)))

    assert cuts(2880, "mxfp4") == Cuts(2880, 192) and cuts(2880, "mxfp4").parts == 15
    assert cuts(768, "int4", 32) == Cuts(768, 64) and cuts(768, "int4", 128) == Cuts(768, 128)
    assert cuts(768, "q6_k") == Cuts(768, 256)
    assert cuts(101, "bf16") == Cuts(101, 32) and cuts(30, "bf16").parts == 1
    assert cuts(2880, "int8").parts == 1, "scales of a row"
    assert all(cuts(units, "bf16").parts <= MOST_PARTS for units in range(1, 3000))


@pytest.mark.parametrize(
    "spec", [quick_or_slow(spec, spec in QUICK) for spec in FORMATS], ids=lambda spec: "-".join(spec.formats)
)
def test_three_engines_compute_what_the_cpu_computes(spec: FusedMoeSpec) -> None:
    is_cut = "int8" not in spec.formats
    module, layer = stored_experts(spec, 4, tokens=2, intermediate=520 if is_cut else 45)
    x, weights = layer.x.to(torch.bfloat16), layer.weights.float()
    index = torch.tensor([[0, 3], [1, 2]])
    with torch.no_grad():
        wanted = module(x, index, weights)
    bound = BOUND_INT8 if "int8" in spec.formats else BOUND
    cut = 0
    for places, share in ((0, 0.0), (0, 1.0), (2, 0.5), (4, 0.0), (0, 0.45), (3, 0.5)):
        store = kept_by(module, places, share, fixed=True)
        assert error(split_call(module, x, index, weights).float(), wanted.float()) <= bound
        figures, layout = store.figures(), store.layers[0].layout
        sent = sent_by(4 - places, share, parts=layout.cuts.parts)
        whole, rest = divmod(sent, layout.cuts.parts)
        units = whole * layout.intermediate + rest * layout.cuts.step
        assert figures.experts["gpu"] == places and sum(figures.experts.values()) == pytest.approx(4)
        assert figures.experts["bus"] == pytest.approx(units / layout.intermediate)
        assert sum(figures.nbytes.values()) == pytest.approx(4 * layout.nbytes, abs=2)
        cut += rest > 0
    assert cut == 2 * is_cut


@pytest.mark.parametrize("form", ["silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved",
                                  "relu2 ungated", "silu ungated biased transposed"])  # fmt: skip
def test_every_form_is_computed_by_address(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 5, 2, 3, form=form)
    module = load(layer, spec_of(ISAS[0], form=form))
    x, weights = layer.x.to(torch.bfloat16), layer.weights.float()
    kept_by(module, 5)
    with torch.no_grad():
        wanted = module(x, layer.index, weights)
    assert error(split_call(module, x, layer.index, weights).float(), wanted.float()) <= BOUND


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("form", ["silu", "silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved",
                                  "relu2 ungated", "silu ungated biased transposed"])  # fmt: skip
def test_tokens_that_choose_the_same_expert_have_its_parts_from_both_engines(
    load: Load, form: str, tokens: int
) -> None:
    layer = random_layer(70, 101, 5, 2, tokens, form=form, experts_used=3)
    module = load(layer, spec_of(ISAS[0], form=form))
    x, weights = layer.x.to(torch.bfloat16), layer.weights.float()
    with torch.no_grad():
        wanted = module(x, layer.index, weights)
    read = list[float]()
    for share in (0.3, 0.55, 0.8):
        store = kept_by(module, 0, share, fixed=True)
        assert error(split_call(module, x, layer.index, weights).float(), wanted.float()) <= BOUND
        assert torch.equal(*(split_call(module, x, layer.index, weights) for _ in range(2)))
        read.append(store.figures().experts["bus"] / 3)
    assert any(number % 1 for number in read), "parts of an expert"


def test_a_number_that_is_no_experts_is_an_error_of_the_step(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 2)
    module = load(layer, spec_of(ISAS[0]))
    kept_by(module, 3)
    for wrong in (5, -1):
        with pytest.raises(IndexError):
            split_call(module, layer.x.bfloat16(), torch.full_like(layer.index, wrong), layer.weights.float())


def test_a_whole_call_of_the_kernel_refuses_choices_that_are_computed_elsewhere(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 2)
    module = load(layer, spec_of(ISAS[0]))
    with pytest.raises(IndexError), torch.no_grad():
        module(layer.x.bfloat16(), torch.full_like(layer.index, COMPUTED_ELSEWHERE), layer.weights.float())


def test_experts_that_are_chosen_more_often_take_places_without_another_result(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 1)
    module = load(layer, spec_of(ISAS[0]))
    store = kept_by(module, 2)
    x, weights, index = layer.x.bfloat16(), layer.weights.float(), torch.tensor([[3, 4]])
    with torch.no_grad():
        wanted = module(x, index, weights)
    seen = list[int]()
    for _ in range(PERIOD + 8):
        before = store.figures().experts["gpu"]
        assert error(split_call(module, x, index, weights).float(), wanted.float()) <= BOUND
        seen.append(store.figures().experts["gpu"] - before)
        store.advance()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    assert seen[0] == 0 and seen[-1] == 2


def test_the_share_of_the_bus_follows_the_speed_of_the_cpu_in_steps(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lead_of", "least_of"):
        monkeypatch.setattr(kept_experts, name, lambda *_: 0.0)  # experts of a kilobyte would all go over the bus
    layer = random_layer(70, 37, 5, 2, 1)
    module = load(layer, spec_of(ISAS[0]))
    store = kept_by(module, 0, 0.01)  # a share that no measured bus has
    nodes = HostNodes(None if DEVICE.type == "cuda" else call_at_once, None if DEVICE.type == "cuda" else LastMoment())
    spent = list[int]()
    for _ in range(MEASURED + 1):
        store.advance()
        with torch.no_grad(), nodes.recorded(module.step_context):
            module(layer.x.to(DEVICE).bfloat16(), torch.tensor([[3, 4]]).to(DEVICE), layer.weights.float().to(DEVICE))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        spent.append(nodes.reads.nanoseconds)
    before = spent[:-1]  # after the look at the last step the bus may read all
    assert sorted(set(before)) == before and spent[-1] >= before[-1], "calls that were dropped stay counted"
    assert int(store.share[0]) > WHOLE_SHARE // 50


def test_calls_of_the_cpu_that_read_no_expert_are_not_in_its_speed(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 3)
    module = load(layer, spec_of(ISAS[0]))
    store, packed = kept_by(module, 5, 0.0), module.weights.packed
    assert packed is not None
    nodes = HostNodes(None if DEVICE.type == "cuda" else call_at_once, None if DEVICE.type == "cuda" else LastMoment())
    given = layer.x.to(DEVICE).bfloat16(), layer.index.to(DEVICE), layer.weights.float().to(DEVICE)
    for is_kept in (True, False):
        if not is_kept:
            store.table.zero_()
        with torch.no_grad(), nodes.recorded(module.step_context):
            module(*given)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        read = 0 if is_kept else len(layer.index.unique())
        assert nodes.reads.nbytes == read * packed.nbytes // 5
        assert (nodes.reads.calls, nodes.reads.nanoseconds > 0) == (int(not is_kept), not is_kept)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.7])
def test_the_cpu_reads_what_the_split_leaves_to_it(load: Load, share: float) -> None:
    layer = random_layer(70, 64, 5, 2, 5)
    module = load(layer, spec_of(ISAS[0]))
    store = kept_by(module, 1, share, fixed=True)
    nodes = HostNodes(None if DEVICE.type == "cuda" else call_at_once, None if DEVICE.type == "cuda" else LastMoment())
    given = layer.x.to(DEVICE).bfloat16(), layer.index.to(DEVICE), layer.weights.float().to(DEVICE)
    read = list[int]()
    for _ in range(2):  # a GPU's first call is made beforehand too, as a trial
        before = store.figures().nbytes["cpu"], nodes.reads.nbytes
        with torch.no_grad(), nodes.recorded(module.step_context):
            module(*given)
        read = [store.figures().nbytes["cpu"] - before[0], nodes.reads.nbytes - before[1]]
    assert read[0] == read[1] > 0


def test_no_step_waits_for_the_counts_of_the_ones_before(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(70, 37, 5, 2, 1)
    module = load(layer, spec_of(ISAS[0]))
    store = kept_by(module, 2)
    asked, are_there = list[bool](), False

    class Mark:
        def query(self) -> bool:
            asked.append(are_there)
            return are_there

    monkeypatch.setattr(store, "figures", None)
    for step in range(PERIOD + 4):
        split_call(module, layer.x.bfloat16(), torch.tensor([[3, 4]]), layer.weights.float())
        with monkeypatch.context() as patched:
            if step == PERIOD - 1:
                patched.setattr(store._copies, "mark", Mark)
            store.advance()
        assert not store._sent and not store._exchanges
    are_there = True
    store.advance()
    assert asked == [False] * 5 + [True] and store._places.keys() & {3, 4}


def test_fixed_tables_stay_as_they_are(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 1)
    module = load(layer, spec_of(ISAS[0]))
    store = kept_by(module, 2, fixed=True)
    table, share = store.table.clone(), store.share.clone()
    for _ in range(PERIOD + 2):
        split_call(module, layer.x.bfloat16(), torch.tensor([[3, 4]]), layer.weights.float())
        store.advance()
    assert torch.equal(table, store.table) and torch.equal(share, store.share)


def test_counts_of_many_runs_weigh_no_more_than_the_steps_that_follow_them(load: Load) -> None:
    module = load(random_layer(70, 37, 5, 2, 1), spec_of(ISAS[0]))
    with torch.inference_mode():
        store = kept_by(module, 2)
    store.place(torch.tensor([[10**9, 10**9, 0, 0, 0]]))
    for _ in range(PERIOD * 20):
        store.counts[0, 3:] += 1
        store.advance()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    assert (store.table[0] != 0).tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("form", [("bf16", 0), ("int4", 32)])
def test_kernels_that_read_experts_by_address_are_checked_before_their_use(
    form: tuple[WeightFormat, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    panels = panels_of(*form)
    check_addressed.__wrapped__(panels, DEVICE)
    with monkeypatch.context() as within:
        stock = kept_kernels.activations
        within.setattr(
            kept_kernels, "activations", lambda *given, per_row, **_: stock(*given, per_row=per_row)
        )  # without biases
        with pytest.raises(HostLacks, match=r"H247.*activations"):
            check_addressed.__wrapped__(panels, DEVICE)
    monkeypatch.setattr(kept_split, "over_bus", lambda misses, share, parts: misses * parts)
    with pytest.raises(HostLacks, match=r"H247.*choices"):
        check_addressed.__wrapped__(panels, DEVICE)
    monkeypatch.setattr(kept_kernels, "sum_of_choices", lambda rows, addresses, weights: rows[:1])
    with pytest.raises(HostLacks, match=r"H247.*products at addresses"):
        check_addressed.__wrapped__(panels, DEVICE)


def test_rows_on_another_device_than_the_tables_are_computed_without_them(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 1)
    module = load(layer, spec_of(ISAS[0]))
    store = kept_by(module, 2)
    x, weights = layer.x.bfloat16(), layer.weights.float()
    with torch.no_grad():
        wanted = module(x, layer.index, weights)
    store.layers[0].table = store.layers[0].table.to("meta")
    assert error(split_call(module, x, layer.index, weights).float(), wanted.float()) <= BOUND
    assert not sum(store.figures().experts.values())


def many_rows(module: FusedMoe, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, int]:
    """Return what a call of many tokens computes, and the bytes that crossed the bus for it."""
    module.offload = Offload((DEVICE,), 1, buffer=1 << 20)
    ring, sent = ring_of(DEVICE, ring_bytes(1 << 20, module.packed_bytes // module.num_experts)), 0
    sent -= ring.figures().sent
    computed = module(x, index, weights)
    return computed, sent + ring.figures().sent


def test_calls_of_many_tokens_are_sent_the_experts_that_are_not_kept(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 40)
    module = load(layer, spec_of(ISAS[0]))
    x, weights, one = layer.x.bfloat16(), layer.weights.float(), module.packed_bytes // 5
    kept_by(module, 0)
    with torch.no_grad():
        ring = ring_of(DEVICE, ring_bytes(1 << 20, one))  # the first call of a ring measures the bus
        wanted, nbytes = many_rows(module, x, layer.index, weights)
        assert nbytes == module.packed_bytes
        store = kept_by(module, 3)
        assert module.weights.packed is not None
        renew_streams(module.weights.packed, sent=False)  # pieces of the next call were sent ahead
        computed, nbytes = many_rows(module, x, layer.index, weights)
    assert torch.equal(computed, wanted) and nbytes == 2 * one
    assert ring.figures().sent and store.num_places == 3


def test_an_expert_on_its_way_to_a_place_is_sent_for_a_call_of_many_tokens(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 40)
    module = load(layer, spec_of(ISAS[0]))
    store = kept_by(module, 2)
    x, weights, one = layer.x.bfloat16(), layer.weights.float(), module.packed_bytes // 5
    with torch.no_grad():
        wanted, _ = many_rows(module, x, layer.index, weights)
        store.counts[0, 4] += 1000
        for _ in range(1000 * PERIOD):  # no step waits for the counts, which are on a GPU
            store.advance()
            if store._sent:
                break
        assert store._sent and module.weights.packed is not None
        renew_streams(module.weights.packed, sent=False)
        computed, nbytes = many_rows(module, x, layer.index, weights)
    assert torch.equal(computed, wanted) and nbytes == 4 * one


def test_locked_pages_that_the_system_refuses_are_told_once_with_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr("torch.cuda.cudart", lambda: refusing)
    monkeypatch.setattr(page_lock, "_refused", [])
    monkeypatch.setattr(page_lock, "_forget_error", lambda: None)
    owners = [torch.nn.Linear(1, 1) for _ in range(3)]
    storages = [torch.empty(2 << 20, dtype=torch.uint8) for _ in owners]
    assert not any(page_lock.page_lock(one, owner) for one, owner in zip(storages, owners, strict=True))
    assert caplog.text.count("L459") == 1
    assert "`ulimit -l`" in caplog.text


def test_copies_of_a_model_keep_no_experts(load: Load) -> None:
    module = load(random_layer(70, 37, 5, 2, 1), spec_of(ISAS[0]))
    kept_by(module, 2)
    assert module.kept is not None and copy.deepcopy(module).kept is None


def test_layers_begin_with_equally_many_experts_or_with_those_chosen_most() -> None:
    assert first_kept(torch.zeros(3, 4), 5) == [0, 4, 8, 1, 5]
    assert first_kept(torch.tensor([[0.0, 9, 0], [5, 0, 7]]), 3) == [1, 5, 3]


def test_an_expert_leaves_only_for_one_that_is_chosen_clearly_more_often() -> None:
    counts = torch.tensor([[10.0, 12, 50], [0, 11, 40]])
    kept = torch.tensor([[True, True, False], [True, False, False]])
    assert exchanges(counts, kept, 8) == [Exchange(2, 3), Exchange(5, 0)]
    assert exchanges(counts, kept, 1) == [Exchange(2, 3)]
    assert exchanges(torch.ones(2, 3), kept, 8) == []


def test_even_choices_exchange_almost_no_expert_and_skewed_ones_those_that_pay() -> None:
    generator = torch.Generator().manual_seed(0)
    even, skewed = torch.full((8, 64), 6 / 64), torch.full((8, 64), 5 / 64)
    skewed[:, 60:] = 0.3
    for rate, least, most in ((even, 0, 5), (skewed, 30, 40)):
        weights, kept, moved = torch.zeros(8, 64), torch.zeros(8, 64, dtype=torch.bool), 0
        kept[:, :16] = True
        for _ in range(40):
            weights = weights * DECAY + torch.poisson(rate * PERIOD, generator=generator)
            for one in exchanges(weights, kept, PERIOD):
                kept.view(-1)[one.entering], kept.view(-1)[one.leaving], moved = True, False, moved + 1
        assert least <= moved <= most
    assert bool(kept[:, 60:].all())
