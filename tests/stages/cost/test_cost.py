"""Amounts are those of the published parameter counts, and times follow the limits of a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from families import CPU, captured, full_size
from places import CONFIGS

from ktc.foundation.host import Gpu
from ktc.foundation.rates import CpuRates, Figure, GpuRates, Rates
from ktc.language import dsl
from ktc.model.experts.kept.kept_division import CALL, Division
from ktc.model.experts.layouts.panel_codes import MOST_ROWS
from ktc.stages.capture import CapturedModel, capture, open_model
from ktc.stages.cost import Use, Work, predict, work_of
from ktc.stages.cost.amounts import Amounts
from ktc.stages.cost.predict import Issue, at
from ktc.stages.cost.traffic import traffic_of
from ktc.stages.cost.types import Core, RoutedExperts
from ktc.stages.match import match
from ktc.stages.plan import Plan, make_plan
from ktc.stages.plan.kept import places_of

GB, TF = 1e9, 1e12
SERVER = replace(CPU, cores=16, threads=16, memory=1 << 40, gpus=(Gpu("card", 80 << 30),))


def rates(**overrides: float) -> Rates:
    """A machine without costs of issuing; each override names a field of the GPU."""
    figures = {
        "grouped": 165 * TF, "attention": 165 * TF, "latent_attention": 165 * TF,
        "bandwidth": 1000 * GB, "bus": 25 * GB, "bus_beside_cpu": 25 * GB, "cpu_beside_bus": 400 * GB,
        "operator": 0.0, "launch": 0.0, "graph_node": 0.0, "host_node": 0.0, **overrides,
    }  # fmt: skip
    one = {16: Figure(440 * GB)}
    cpu = CpuRates(
        {"bf16": {16: Figure(20 * TF)}}, one, one[16], Figure(20 * TF), Figure(20 * TF), Figure(0.0), Figure(0.0)
    )
    gpu = GpuRates(
        {"bf16": Figure(165 * TF), "fp32": Figure(40 * TF)}, context=0, **{k: Figure(v) for k, v in figures.items()}
    )
    return Rates(cpu, (gpu,), Figure(GB))


@pytest.fixture(scope="module")
def v2_lite() -> CapturedModel:
    return full_size("deepseek-v2-lite")


def planned(model: CapturedModel, program: str = "moe-lora") -> Plan:
    rules = dsl.load(program, {"device": "cpu"})
    return make_plan(model, (), match(model, rules, SERVER), rules, SERVER)


def test_a_token_meets_as_many_parameters_as_the_authors_count(v2_lite: CapturedModel) -> None:
    works = work_of(v2_lite, planned(v2_lite))
    assert sum(work.products for work in works) == 2_451_308_544
    experts = [work for work in works if work.experts is not None]
    assert len(experts) == 26
    assert {work.products for work in experts} == {6 * 8_650_752}


@pytest.mark.parametrize("program", ["moe-lora", "moe-experts-lora"])
def test_adapters_have_the_parameters_that_are_trained(v2_lite: CapturedModel, program: str) -> None:
    plan = planned(v2_lite, program)
    assert plan.lora is not None
    assert sum(work.adapter for work in work_of(v2_lite, plan)) == plan.lora.trainable


@pytest.mark.parametrize(("tokens", "distinct"), [(1, 6.0), (4, 20.8), (32, 61.3), (256, 64.0)])
def test_tokens_use_as_many_distinct_experts_as_even_choices_give(tokens: int, distinct: float) -> None:
    assert 64 * RoutedExperts(64, 6).touched(tokens) == pytest.approx(distinct, abs=0.05)


def test_an_expert_of_one_token_has_one_flop_per_byte() -> None:
    expert = Work("experts", 0, "cpu", "bf16", products=6e6, weights=2 * 64 * 1e6, experts=RoutedExperts(64, 6))
    assert Amounts(Use("decode", 1, 1)).intensity(expert) == pytest.approx(1.0)
    assert Amounts(Use("decode", 32, 1)).intensity(expert) == pytest.approx(3.1, abs=0.05)


def test_a_step_from_memory_takes_the_time_of_its_bytes(v2_lite: CapturedModel) -> None:
    works = work_of(v2_lite, planned(v2_lite))
    step = predict(works, Use("decode", 1, 4096), rates(), 16)
    read = 2 * 2_451_308_544 + 27 * 4096 * works[1].core.cached
    assert step.binds == "cpu"
    assert step.seconds == pytest.approx(read / (440 * GB), rel=0.05)


def test_streamed_experts_take_the_bus_and_hide_what_runs_beside_it(v2_lite: CapturedModel) -> None:
    works = [
        replace(w, device="cuda:0", experts=w.experts and replace(w.experts, devices=("cuda:0",), least=1))
        for w in work_of(v2_lite, planned(v2_lite))
    ]
    step = predict(works, Use("train", 16, 512), rates(bandwidth=8000 * GB), 16)
    nbytes = sum(work.weights for work in works if work.experts)
    bus, gpu, host = (step.engines[name] for name in ("bus:cuda:0", "cuda:0", "host"))
    assert step.binds == "bus:cuda:0"
    assert bus == pytest.approx(2 * nbytes / (25 * GB))
    assert step.seconds == pytest.approx(bus + 0.2 * (gpu + host))


def test_a_gpu_waits_for_experts_on_the_cpu(v2_lite: CapturedModel) -> None:
    works = [w if w.experts else replace(w, device="cuda:0") for w in work_of(v2_lite, planned(v2_lite))]
    measured = rates(host_node=50e-6, graph_node=1e-6)
    step = predict(works, Use("decode", 1, 1024), measured, 16, Issue(cuda_graph=True))
    assert step.seconds == pytest.approx(step.engines["cuda:0"] + step.engines["cpu"] + step.crossings)
    assert step.crossings == pytest.approx(26 * (2 * 4.2e-6 + 3e-6), rel=0.05), "a thread answers between two kernels"


STEP = Use("decode", 1, 64)


@pytest.mark.parametrize(
    ("kept", "share", "read"),
    [(0.0, 0.37, (0.0, 2.0, 4.0)), (0.0, 0.0, (0.0, 0.0, 6.0)), (0.5, 0.37, (3.0, 1.0, 2.0)), (1.0, 0.37, (6.0, 0, 0)),
     (0.25, 0.37, (1.5, 1.5, 3.0))],
)  # fmt: skip
def test_a_step_reads_whole_experts_by_three_engines(
    kept: float, share: float, read: tuple[float, float, float]
) -> None:
    experts = RoutedExperts(64, 6, ("cuda:0",), 1024, kept=kept, bus_share=share)
    assert experts.engines(STEP) == pytest.approx(read)
    assert experts.engines(Use("prefill", 1, 4)) is None and experts.engines(Use("decode", 17, 4)) is None
    assert replace(experts, bus_share=None).engines(STEP) is None


def test_a_step_divides_one_expert_by_its_parts() -> None:
    whole = RoutedExperts(64, 6, ("cuda:0",), 1024, bus_share=0.37)
    divided = replace(whole, parts=16)
    assert divided.engines(STEP) == pytest.approx((0.0, 35 / 16, 6 - 35 / 16))
    assert replace(divided, kept=5 / 6).engines(STEP, 0.2) == pytest.approx((5.0, 9 / 16, 7 / 16))
    assert replace(whole, kept=5 / 6).engines(STEP, 0.2) == pytest.approx((5.0, 0.0, 1.0))


def test_a_step_waits_for_the_slowest_of_the_engines_that_read_experts() -> None:
    experts = RoutedExperts(64, 6, ("cuda:0",), 1024, kept=0.5, bus_share=0.37)
    one = Work("experts", 0, "cpu", "bf16", products=6e6, weights=64e6, experts=experts, packed=True)
    attention = Work("attention", 0, "cuda:0", "bf16", weights=1e6)
    step = predict([attention, one], STEP, rates(bus_beside_cpu=20 * GB), 16, Issue(cuda_graph=True))
    times = {"bus:cuda:0": 1e6 / (20 * GB), "cpu": 2e6 / (400 * GB) + CALL}
    assert {engine: step.engines[engine] for engine in times} == pytest.approx(times)
    assert step.kinds["experts"] == pytest.approx(times["bus:cuda:0"]) and step.binds == "bus:cuda:0"
    assert step.seconds == pytest.approx(times["bus:cuda:0"] + 1e6 / (1000 * GB) + step.crossings)
    prompt = predict([attention, one], Use("prefill", 1, 2048), rates(), 16)
    assert prompt.engines["bus:cuda:0"] == pytest.approx(32e6 / (25 * GB)), "kept experts are not sent"
    assert traffic_of([one], Amounts(STEP)) == {("cpu", "cuda:0"): pytest.approx(1e6)}


def test_a_prompt_that_is_not_sent_waits_for_bus_and_cpu_which_end_together() -> None:
    division = Division(17, 100.0)
    experts = RoutedExperts(64, 6, ("cuda:0",), 1024, kept=0.25, bus_share=0.25, division=division)
    one = Work("experts", 0, "cpu", "bf16", products=6e6, weights=64e6, experts=experts, packed=True, decoded=True)
    attention, machine = Work("attention", 0, "cuda:0", "bf16", weights=1e6), rates(cpu_beside_bus=75 * GB)
    for tokens, cost in ((640, 1.0), (6400, 6.0)):
        given = replace(one, experts=replace(experts, least=10_000))
        prompt = predict([attention, given], Use("prefill", 1, tokens), machine, 16)
        assert prompt.engines["bus:cuda:0"] == pytest.approx(prompt.engines["cpu"])
        assert prompt.engines["bus:cuda:0"] == pytest.approx(48e6 / (25 * GB + 75 * GB / cost))
    assert experts.engines(Use("prefill", 1, 16)) is None and experts.engines(Use("prefill", 1, 1024)) is None
    assert experts.engines(Use("decode", 32, 64)) is None and experts.engines(Use("train", 1, 512)) is None


def test_a_measured_step_on_bus_and_cpu_is_predicted_within_a_fifth(tmp_path: Path) -> None:
    """Six layers on an H200 took 4.6 to 4.8 ms (2026-11-29, commit e535f7b7). The rates are those of another such host.

    Before `generate` ran a step ahead and a thread answered the calls of experts, they took 6.9 ms (9ad2fb82).
    """
    measured = {
        "bandwidth": 4112 * GB, "bus": 54.93 * GB, "bus_beside_cpu": 50.12 * GB, "cpu_beside_bus": 85.37 * GB,
        "operator": 24.75e-6, "launch": 6.946e-6, "graph_node": 0.9431e-6, "host_node": 22.12e-6,
    }  # fmt: skip
    host = replace(SERVER, described=rates(**measured), gpus=(Gpu("NVIDIA H200", 140 << 30),))
    config = json.loads((CONFIGS / "deepseek-v2-lite" / "config.json").read_text()) | {"num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = capture(open_model(tmp_path))
    rules = dsl.load("moe-inference", {"device": "cuda:0", "prefill": "cuda:0"})
    plan = make_plan(model, (), match(model, rules, host), rules, host)
    assert places_of(plan) == (0, 320, 0.37)
    step = predict(work_of(model, plan), STEP, host.rates, 16, Issue(plan.cuda_graph, whole=True))
    assert step.seconds == pytest.approx(4.7e-3, rel=0.2)


WINDOWED = Core(scores=10.0, cached=4.0, repeated=64.0, window=128)


@pytest.mark.parametrize(
    ("core", "length", "prompt", "decoding"),
    [
        (replace(WINDOWED, window=0), 512, 256.5, 512),
        (WINDOWED, 128, 64.5, 128),
        (WINDOWED, 512, 512, 128),  # a mask: scores of all pairs, of which a token sees a window
        (replace(WINDOWED, pair=30.0), 128, 128, 128),
    ],
)
def test_scores_are_counted_as_they_are_computed(core: Core, length: int, prompt: float, decoding: int) -> None:
    work = Work("attention", 0, "cpu", "bf16", core=core)
    read, step = Amounts(Use("prefill", 1, length)), Amounts(Use("decode", 1, length))
    assert read.scored(work) == 2 * length * prompt * 10
    assert read.moved(work) == length * prompt * core.pair
    assert step.scored(work) == 2 * decoding * 10
    assert step.moved(work) == decoding * (4 + 64 + core.pair)
    assert step.moved(replace(work, core=replace(core, fused=True))) == decoding * 4


def test_sinks_keep_all_scores_in_memory_and_windows_are_those_of_the_layers() -> None:
    model, other = captured("gpt_oss"), captured("qwen3_moe")
    config = model.model.config
    cores = [work.core for work in work_of(model, planned(model)) if work.kind == "attention"]
    assert {core.window for core in cores} == {config.sliding_window, 0}
    assert all(core.pair == 39 * config.num_attention_heads * 2 for core in cores)
    assert all(work.core.pair == 0 for work in work_of(other, planned(other)))


def test_a_graph_has_norms_in_a_kernel_each(v2_lite: CapturedModel) -> None:
    norms = work_of(v2_lite, planned(v2_lite))[0]
    amounts = Amounts(Use("decode", 1, 8))
    assert (amounts.operators(norms), amounts.nodes(norms)) == (16, 2)


def test_a_step_reads_the_chosen_experts_of_kernels_in_place_and_copies_stock_ones() -> None:
    there = RoutedExperts(64, 6, ("cuda:0",), 1, resident=True)
    stock = Work("experts", 0, "cuda:0", "bf16", 6e6, 64e6, operators=12, experts=there)
    plain = replace(stock, packed=True, decoded=True)
    one, many = (Amounts(Use("decode", batch, 8)) for batch in (1, 32))
    assert (one.copied(stock), one.copied(plain), many.copied(stock)) == (12e6, 0, 0)
    assert one.nodes(plain) < one.nodes(replace(plain, decoded=False)) < one.nodes(stock) == many.nodes(plain)
    assert Amounts(Use("prefill", 1, 8)).copied(stock) == 0


def test_figures_of_other_thread_counts_are_between_those_around_them() -> None:
    figures = {1: Figure(10.0), 15: Figure(80.0), 16: Figure(70.0)}
    assert [at(figures, threads) for threads in (1, 8, 15, 16, 99)] == [10.0, 45.0, 80.0, 70.0, 70.0]


def test_a_model_without_kernels_is_issued_once_per_sequence(v2_lite: CapturedModel) -> None:
    works = [replace(w, device="cuda:0", experts=None) for w in work_of(v2_lite, planned(v2_lite))]

    def host(calls: int) -> float:
        return predict(works, Use("train", 16, 512), rates(operator=1e-5), 16, Issue(calls=calls)).engines["host"]

    assert host(16) == pytest.approx(16 * host(1), rel=0.01)


def test_a_gpu_unpacks_the_weights_of_a_kernel() -> None:
    there = RoutedExperts(64, 6, ("cuda:0",), 1, resident=True)
    plain = Work("experts", 0, "cuda:0", "bf16", products=1.0, weights=1e9, experts=there)
    times = [
        predict((work,), Use("prefill", 1, 4096), rates(), 16).seconds for work in (plain, replace(plain, packed=True))
    ]
    assert times[1] > 10 * times[0]


def test_a_gpu_decodes_codes_for_many_rows_and_in_backward() -> None:
    experts = RoutedExperts(64, 8, ("cuda:0",), 1, resident=True, chunks=4)
    work = Work("experts", 0, "cpu", "int4", 8e6, 36e6, experts=experts, packed=True, coded=True)
    few = MOST_ROWS * experts.count // experts.top_k
    copies = {
        tokens: [Amounts(Use(phase, 1, tokens)).unpacking(work) / (4 * 64e6) for phase in ("prefill", "train")]
        for tokens in (few, few + 1)
    }
    assert copies[few] == pytest.approx([0, 1])
    assert copies[few + 1] == pytest.approx([1, 2])
    assert Amounts(Use("prefill", 1, few)).issued(work) < Amounts(Use("prefill", 1, few + 1)).issued(work)


def test_few_rows_times_codes_take_longer_than_their_bytes_and_fewer_flops() -> None:
    machine = rates()
    experts = RoutedExperts(64, 8, ("cuda:0",), 1, resident=True)
    plain = Work("experts", 0, "cpu", "bf16", 8e6, 36e6, packed=True, decoded=True, experts=experts)
    coded = replace(plain, weight_format="int4", decoded=False, coded=True)
    prompt, step = Use("prefill", 1, 512), Use("decode", 1, 512)
    assert predict([coded], prompt, machine, 16).seconds > predict([plain], prompt, machine, 16).seconds
    on_cpu = [replace(work, experts=RoutedExperts(64, 8)) for work in (plain, coded)]
    of_plain, of_coded = (predict([work], step, machine, 16).seconds for work in on_cpu)
    assert of_coded > 1.5 * of_plain


def test_checkpointing_reads_weights_once_more(v2_lite: CapturedModel) -> None:
    work = work_of(v2_lite, planned(v2_lite))[1]
    plain, again = (Amounts(Use("train", 1, 8, checkpointing=on)) for on in (False, True))
    assert (plain.passes, again.passes) == (2, 3)
    assert again.flops(work) > plain.flops(work)


def test_layers_on_two_gpus_in_turn_take_as_long_as_on_one(v2_lite: CapturedModel) -> None:
    on_one = [replace(w, device="cuda:0", experts=None) for w in work_of(v2_lite, planned(v2_lite))]
    in_turn = [replace(w, device=f"cuda:{(w.layer or 26) // 14}") for w in on_one]
    machine = rates()
    two = replace(machine, gpus=machine.gpus * 2)
    use = Use("prefill", 1, 4096)
    assert predict(in_turn, use, two, 16).seconds == pytest.approx(predict(on_one, use, two, 16).seconds)


def test_traffic_is_sent_weights_and_hidden_states_with_their_gradients() -> None:
    layer = Work("norms", 0, "cuda:0", "", hidden=4)
    resident = RoutedExperts(8, 2, ("cuda:0", "cuda:1"), 1, resident=True)
    experts = Work("experts", 0, "cpu", "bf16", weights=1000, hidden=4, packed=True, experts=resident)
    later = replace(layer, layer=1, device="cuda:1")
    use = Use("train", 2, 5)
    states = 2 * 10 * 4  # of ten tokens, and their gradients
    assert traffic_of((layer, experts, later), Amounts(use)) == {("cuda:0", "cuda:1"): 3 * states}
    sent = replace(experts, experts=replace(resident, resident=False))
    assert traffic_of((layer, sent), Amounts(use)) == {
        ("cpu", "cuda:0"): 2 * 500, ("cpu", "cuda:1"): 2 * 500, ("cuda:0", "cuda:1"): 2 * states,
    }  # fmt: skip
    on_cpu = replace(experts, experts=RoutedExperts(8, 2))
    assert traffic_of((layer, on_cpu), Amounts(Use("decode", 1, 9))) == {("cpu", "cuda:0"): 8}
    on_one = replace(experts, experts=replace(resident, devices=("cuda:0",)))
    assert traffic_of((layer, on_one), Amounts(use)) == {}
