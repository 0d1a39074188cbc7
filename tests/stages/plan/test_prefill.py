"""`place(cpu, prefill = D)` on experts: planned with its number of tokens, told, and refused where it cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from families import CPU, captured, planned, rules

from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation.host import Gpu, Host
from ktc.foundation.rates import Figure
from ktc.model.experts.streamed.stream_sizes import DEFAULT_BUFFER, TIGHT_BUFFER
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.kernels.packed_size import packed_bytes
from ktc.model.linears import coded_weight
from ktc.model.targets import linear_kernel
from ktc.stages.link import dump_stage
from ktc.stages.match import match
from ktc.stages.plan import Plan, make_plan
from ktc.stages.plan.types import Choices
from ktc.stages.rewrite import linear_steps, recipe, rewrite

SPEC = PackedLinearSpec("packed_linear", "bf16", "q8_0", "scalar")
GPU = replace(CPU, gpus=(Gpu("test", 24 << 30),))
MANY = "rule many { match moe.opaque as m => place(cpu, prefill = cuda:0) on m.experts }\n"
TRAINED = "rule experts { match moe.block => cpu_moe() => lora_experts(rank = 8, alpha = 16) }\n"
EXPERTS = "rule experts { match moe.block => cpu_moe() }\n"


def plan_of(text: str, folder: Path, host: Host = GPU) -> Plan:
    return planned(captured("deepseek_v2"), rules(text, folder), host)[1]


@pytest.mark.parametrize(("extra", "tokens"), [("", 1024), ("plan { layerwise_prefill = 300 }", 300)])
def test_calls_with_many_tokens_go_to_the_gpu_and_the_experts_stay(extra: str, tokens: int, tmp_path: Path) -> None:
    plan = plan_of(EXPERTS + MANY + extra, tmp_path)
    assert {p.fqn for p in plan.placements} == {""}  # nothing lies elsewhere
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert steps
    assert all(
        (step.device, step.args["prefill"], step.args["prefill_tokens"]) == ("cpu", ["cuda:0"], tokens)
        for step in steps
    )
    assert any(
        f"from {tokens} tokens on `cuda:0`, where the weights are sent" in reason.text for reason in plan.reasons
    )


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_gpu_everything_stays_with_the_kernel(device: str, tmp_path: Path) -> None:
    plan = plan_of(EXPERTS + MANY.replace("cuda:0", device), tmp_path, CPU)
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert not any(step.args["prefill"] for step in steps)


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostLacks, match=r"prefill = cuda:0"):
        plan_of(EXPERTS + MANY, tmp_path, CPU)


def test_weights_that_are_sent_are_not_cut_for_numa_nodes(tmp_path: Path) -> None:
    two = replace(GPU, numa=2)
    for program, cut in ((EXPERTS + MANY, "none"), (EXPERTS, "shard")):
        plan = plan_of(program, tmp_path, two)
        assert {step.args["numa"] for step in recipe(rewrite(captured("deepseek_v2"), plan), two)} == {cut}


def test_weights_that_are_to_be_cut_and_sent_are_refused_once(tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refusal:
        plan_of(EXPERTS.replace("cpu_moe()", "cpu_moe(numa = shard)") + MANY, tmp_path, replace(GPU, numa=2))
    (problem,) = refusal.value.diagnostics
    assert problem.code == "M078"
    assert "several NUMA nodes" in problem.message


def test_weights_in_codes_are_sent_as_they_are_stored(tmp_path: Path) -> None:
    plan = plan_of(EXPERTS.replace("cpu_moe()", "cpu_moe(format = int8)") + MANY, tmp_path)
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert all(step.args["prefill"] == ["cuda:0"] for step in steps)


def test_a_number_of_tokens_without_experts_that_go_elsewhere_is_told(tmp_path: Path) -> None:
    (told,) = without_effect(plan_of(EXPERTS + "plan { layerwise_prefill = 300 }", tmp_path))
    assert "has no effect" in told


def without_effect(plan: Plan) -> list[str]:
    """The warnings about settings that do nothing."""
    return [each.message for each in plan.warnings if each.code == "M066"]


def streamed(plan: Plan) -> list[str]:
    """Whether the experts of each layer stay on the GPU."""
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    return ["resident" if step.args["resident"] else "each pass" for step in steps if step.module == "fused_moe"]


def test_outputs_of_experts_that_stay_on_the_gpu_of_their_layer_wait_there_for_backward(tmp_path: Path) -> None:
    def activations(sent_to_gpu: str, place: str) -> tuple[int, int]:
        everything = f'rule all {{ match module at "*" => place({place}) }}\n'
        budget = "plan { mode = train  cuda:0 = 20GiB  stream_buffer = 1MiB }"
        plan = plan_of(everything + TRAINED + sent_to_gpu + budget, tmp_path)
        (training,) = (use for use in plan.memory.workloads if "checkpointing" in use.name)
        return training.needs["cuda:0"]["activations"], training.batch * training.length

    (on_cpu, tokens), (stay, _) = activations("", "cuda:0"), activations(MANY, "cuda:0")
    model = captured("deepseek_v2")
    layers = len(streamed(plan_of(EXPERTS + MANY, tmp_path)))
    assert stay - on_cpu == layers * tokens * int(model.facts["hidden"]) * model.model.dtype.itemsize
    assert activations(MANY, "cpu")[0] == 0, "a layer of another device gets them back at once"


def test_automatic_prefill_is_shared_by_all_gpus(tmp_path: Path) -> None:
    two = replace(GPU, gpus=GPU.gpus * 2)
    plan = plan_of(EXPERTS + MANY.replace("cuda:0", "auto"), tmp_path, two)
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert all(step.args["prefill"] == ["cuda:0", "cuda:1"] for step in steps)
    assert {held.device: held.streaming for held in plan.devices} == {"cpu": 0, "cuda:0": 1 << 30, "cuda:1": 1 << 30}


def test_adapters_of_sent_experts_count_on_their_gpu_where_they_are_a_small_part_of_it(tmp_path: Path) -> None:
    def adapters(budget: int) -> tuple[dict[str, int], dict[str, int]]:
        plan = plan_of(TRAINED + MANY + f"plan {{ cuda:0 = {budget}KiB, stream_buffer = 1MiB }}", tmp_path)
        of_experts = {of_device.device: of_device.expert_adapter for of_device in plan.devices}
        return of_experts, {of_device.device: of_device.adapter for of_device in plan.devices}

    of_experts, all_of_them = adapters(1 << 20)
    nbytes = of_experts["cuda:0"]
    assert of_experts == all_of_them == {"cpu": 0, "cuda:0": nbytes}
    lora = plan_of(TRAINED + MANY, tmp_path).lora
    assert lora is not None
    assert nbytes == 4 * 4 * lora.trainable  # fp32: weights, gradients, two moments
    assert adapters(3 * nbytes // 1024)[0] == {"cpu": nbytes, "cuda:0": 0}
    assert adapters((1 << 10) + nbytes // 1024 - 1)[0] == {"cpu": nbytes, "cuda:0": 0}, "the ring has the rest"


def test_the_memory_that_weights_pass_through_is_a_setting_and_counted(tmp_path: Path) -> None:
    plan = plan_of(EXPERTS + MANY + "plan { stream_buffer = 300MiB }", tmp_path)
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    assert {step.args["stream_buffer"] for step in steps} == {300 << 20}
    assert {held.device: held.streaming for held in plan.devices} == {"cpu": 0, "cuda:0": 300 << 20}
    (told,) = without_effect(plan_of(EXPERTS + "plan { stream_buffer = 300MiB }", tmp_path))
    assert "has no effect: no weights are sent to a GPU" in told


def test_a_budget_keeps_as_many_layers_on_the_gpu_as_it_has_room_for(tmp_path: Path) -> None:
    program = EXPERTS + MANY + "plan { stream_buffer = 1MiB  cuda:0 = SIZE }"
    whole = streamed(plan_of(program.replace("SIZE", "20GiB"), tmp_path))
    assert set(whole) == {"resident"}
    assert set(streamed(plan_of(program.replace("SIZE", "1MiB"), tmp_path))) == {"each pass"}
    without = plan_of(program.replace("cuda:0 = SIZE", ""), tmp_path)
    (layer,) = {packed_bytes(spec) for spec in without.kernels if spec.op == "fused_moe"}
    needed = layer + sum(without.memory.workloads[-1].needs["cuda:0"].values())
    one = streamed(plan_of(program.replace("SIZE", f"{needed // 1024 + 1}KiB"), tmp_path))
    assert sorted(one) == ["each pass"] * (len(whole) - 1) + ["resident"]
    assert set(streamed(plan_of(EXPERTS + MANY, tmp_path))) == {"each pass"}


def test_linear_layers_are_streamed_and_their_weights_stay_on_the_host(tmp_path: Path) -> None:
    program = EXPERTS + 'rule attention { match module at "model.layers.*.self_attn" => place(stream = cuda:0) }'
    plan = plan_of(program, tmp_path)
    assert {each.fqn.rpartition(".")[2] for each in plan.streams} >= {"kv_b_proj", "o_proj"}
    assert {each.device for each in plan.streams} == {"cuda:0"}
    held = {each.device: each for each in plan.devices}
    assert held["cuda:0"].weights < held["cpu"].kinds["attention"]
    assert held["cuda:0"].streaming == 1 << 30


def test_a_module_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refusal:
        plan_of(EXPERTS + 'rule norm { match module at "model.norm" => place(stream = cuda:0) }', tmp_path)
    assert [each.code for each in refusal.value.diagnostics] == ["M079"]


@pytest.mark.parametrize("settings", ["cuda:0, stream = cuda:0", "stream = cuda:0, prefill = cuda:0"])
def test_settings_that_contradict_each_other_are_refused(settings: str, tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refusal:
        plan_of(EXPERTS + MANY.replace("cpu, prefill = cuda:0", settings), tmp_path)
    assert [each.code for each in refusal.value.diagnostics] == ["M080"]


def test_a_program_that_trains_nothing_has_its_resident_layers_too(tmp_path: Path) -> None:
    plan = plan_of(EXPERTS + MANY + "plan { mode = train  cuda:0 = 20GiB }", tmp_path)
    assert set(streamed(plan)) == {"resident"}


def test_a_weight_that_two_modules_share_is_not_streamed(tmp_path: Path) -> None:
    program = rules(EXPERTS + 'rule head { match module at "lm_head" => place(stream = cuda:0) }', tmp_path)
    with pytest.raises(InputRefused, match=r"M079.*another module shares its weight"):
        planned(captured("deepseek_v2", tie_word_embeddings=True), program, GPU)


STAYING = "rule a { match moe.block => gpu_moe(format = int8) }\n"


def test_experts_of_gpu_moe_stay_on_the_gpu_of_their_block(tmp_path: Path) -> None:
    placed = STAYING + 'rule b { match module at "model" => place(cuda:1) }'
    plan = plan_of(placed, tmp_path, replace(GPU, gpus=GPU.gpus * 2))
    steps = [s for s in recipe(rewrite(captured("deepseek_v2"), plan), plan.host) if s.module == "fused_moe"]
    assert steps
    assert all(s.args["resident"] and s.args["prefill"] == ["cuda:1"] and s.args["prefill_tokens"] == 1 for s in steps)
    assert {held.device for held in plan.devices if held.streaming} == {"cuda:1"}
    shown = dump_stage("planned", captured("deepseek_v2"), None, plan)
    assert {node.device for block in shown.blocks for node in block.nodes if node.rule} == {"cuda:1"}
    assert any("as one node on `cuda:1`, where the weights stay" in reason.text for reason in plan.reasons)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (STAYING + MANY, "leave `prefill` and `stream` out"),
        (STAYING.replace("int8", "int8, numa = shard"), "several NUMA nodes"),
    ],
)
def test_gpu_moe_refuses_what_contradicts_it(program: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refusal:
        plan_of(program, tmp_path, replace(GPU, numa=2))
    (problem,) = refusal.value.diagnostics
    assert (problem.code, reason in problem.message) == ("M078", True)


STEPS = """rule all { match module at "*" => place(cuda:0) }
plan { stream_buffer = 1MiB  cuda_graph = decode  SETTINGS }
"""


def kept_by(settings: str, folder: Path, program: str = EXPERTS) -> list[tuple[int | None, float, bool]]:
    """What each layer keeps on the GPU for decoding, with everything else on it."""
    plan = plan_of(program + MANY + STEPS.replace("SETTINGS", settings), folder)
    steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
    of_experts = [step.args for step in steps if step.module == "fused_moe"]
    return [(args["kept"], args["bus_share"], args["fixed_split"]) for args in of_experts]


def test_a_budget_keeps_single_experts_of_all_layers_where_steps_are_graphs(tmp_path: Path) -> None:
    without = plan_of(EXPERTS + MANY + STEPS.replace("SETTINGS", ""), tmp_path)
    (spec,) = (spec for spec in without.kernels if spec.op == "fused_moe")
    needed = sum(without.memory.workloads[-1].needs["cuda:0"].values())
    budget = f"cuda:0 = {(needed + 3 * packed_bytes(spec) // spec.num_experts) // 1024 + 1}KiB"
    plan = plan_of(EXPERTS + MANY + STEPS.replace("SETTINGS", budget), tmp_path)
    assert any("cuda:0 keeps 3 of 32 routed experts" in reason.text for reason in plan.reasons)
    shown = dump_stage("planned", captured("deepseek_v2"), None, plan)
    assert any("in decoding it keeps 1 of them" in note for block in shown.blocks for note in block.notes)
    kept = kept_by(budget, tmp_path)
    assert sum(places or 0 for places, *_ in kept) == 3 and {fixed for *_, fixed in kept} == {False}
    assert all(0 < share < 1 for _, share, _ in kept)
    assert {fixed for *_, fixed in kept_by(f"{budget} experts_split = fixed", tmp_path)} == {True}
    assert {places for places, *_ in kept_by("cuda:0 = 20GiB", tmp_path)} == {None}, "whole layers fit"


def test_a_tight_budget_has_a_small_ring_and_the_table_in_host_memory(tmp_path: Path) -> None:
    def rings(budget: str, more: str = "") -> tuple[set[int], str]:
        steps = STEPS.replace("stream_buffer = 1MiB", more).replace("SETTINGS", f"cuda:0 = {budget}")
        plan = plan_of(EXPERTS + MANY + steps, tmp_path)
        prefills = [action.prefill for rewrite in plan.rewrites for action in rewrite.actions if action.prefill]
        table = plan.table.fqn if plan.table else ""
        on_host = sum(one.kinds.get("embeddings", 0) for one in plan.devices if one.device == "cpu")
        assert (on_host > 0) == bool(table)
        steps_of = [step for step in linear_steps(plan) if step.module == "host_table"]
        assert [(step.fqn, step.device) for step in steps_of] == [(table, "cuda:0")] * bool(table)
        return {prefill.buffer for prefill in prefills}, table

    assert rings("20GiB") == ({DEFAULT_BUFFER}, "")
    needed = 700 << 20  # more than a small ring, and less than the usual one
    assert rings(f"{needed >> 10}KiB") == ({TIGHT_BUFFER}, "model.embed_tokens")
    assert rings("5600KiB", "stream_buffer = 1MiB") == ({1 << 20}, "model.embed_tokens")
    assert rings("3MiB", "stream_buffer = 1MiB") == ({1 << 20}, ""), "no expert would have a place by it"


def test_weights_in_blocks_that_prompts_decode_have_room_on_their_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_kernel, "blocks_on_gpus", lambda seen: "q8_0")
    monkeypatch.setattr(linear_kernel, "_packed", lambda stored, seen: SPEC)
    text = """rule all { match module at "*" => place(cuda:0) }
rule linear { match linear at "LAYERS" => kt_linear(auto) }
plan { tokens = TOKENS }
"""

    def workspace(layers: str, tokens: int) -> int:
        plan = plan_of(text.replace("LAYERS", layers).replace("TOKENS", str(tokens)), tmp_path)
        return plan.memory.workloads[-1].needs["cuda:0"].get("workspace", 0)

    config = captured("deepseek_v2").model.config
    sizes = config.num_attention_heads * config.v_head_dim * config.hidden_size
    assert workspace("model.layers.*.self_attn.o_proj", 64) == 2 * sizes
    assert workspace("model.layers.*.self_attn.o_proj", 2) == 0 == workspace("lm_head", 64)
    monkeypatch.setattr(coded_weight, "_LARGE", 0)
    assert [workspace("model.layers.*.self_attn.o_proj", tokens) for tokens in (128, 129)] == [0, 2 * sizes]


def test_prompts_are_divided_where_a_program_asks_for_it_and_it_pays(tmp_path: Path) -> None:
    fast = replace(GPU.rates, gpus=tuple(replace(gpu, operator=Figure(1e-12)) for gpu in GPU.rates.gpus))
    host = replace(GPU, described=fast)
    for settings, divided in (("", {0}), ("divided_prompts = auto", {17}), ("divided_prompts = off", {0})):
        plan = plan_of(EXPERTS + MANY + STEPS.replace("SETTINGS", settings), tmp_path, host)
        steps = recipe(rewrite(captured("deepseek_v2"), plan), plan.host)
        assert {step.args["divided"] for step in steps if step.module == "fused_moe"} == divided


@pytest.mark.parametrize(("small", "needs"), [("2.0 MiB", ""), ("1.1 GiB", "stream_buffer = 1200MiB")])
def test_a_budget_without_room_for_an_expert_is_told_with_one_that_has_it(
    tmp_path: Path, small: str, needs: str
) -> None:
    def plan(budget: str) -> Plan:
        steps = STEPS.replace("stream_buffer = 1MiB", needs or "stream_buffer = 1MiB")
        return plan_of(EXPERTS + MANY + steps.replace("SETTINGS", f"cuda:0 = {budget}"), tmp_path)

    (told,) = (one for one in plan(small.replace(" ", "")).warnings if one.code == "M098")
    assert told.span is not None and f"has room for no expert: it is {small}" in told.message
    assert ("CUDA's context" in told.message) == bool(needs)
    enough = re.search(r"`cuda:0 = (\d+MiB)`", told.hint or "")
    assert enough is not None
    more = plan(enough[1])
    assert all(one.code != "M098" for one in more.warnings)


def test_a_program_that_serves_keeps_whole_layers_where_one_fits(tmp_path: Path) -> None:
    without = plan_of(EXPERTS + MANY + STEPS.replace("SETTINGS", ""), tmp_path)
    (spec,) = (spec for spec in without.kernels if spec.op == "fused_moe")
    needed = sum(without.memory.workloads[-1].needs["cuda:0"].values())

    def kept(room: int, mode: str) -> list[tuple[int | None, bool]]:
        settings = f"cuda:0 = {(needed + room) // 1024 + 1}KiB mode = {mode}"
        plan = plan_of(EXPERTS + MANY + STEPS.replace("SETTINGS", settings), tmp_path)
        steps = [s for s in recipe(rewrite(captured("deepseek_v2"), plan), plan.host) if s.module == "fused_moe"]
        return [(step.args["kept"], step.args["resident"]) for step in steps]

    layer = packed_bytes(spec)
    whole = kept(layer + layer // 2, "serve")
    assert sorted(whole, key=str) == [(0, False)] * (len(whole) - 1) + [(None, True)]
    assert {resident for _, resident in kept(layer + layer // 2, "infer")} == {False}
    assert sum(places or 0 for places, _ in kept(layer // 2, "serve")) == (spec.num_experts or 0) // 2


def test_experts_on_another_gpu_than_the_steps_are_not_split(tmp_path: Path) -> None:
    program = EXPERTS + MANY + STEPS.replace("cuda:0", "cuda:1").replace("SETTINGS", "")
    plan = plan_of(program, tmp_path, replace(GPU, gpus=GPU.gpus * 2))
    steps = [s for s in recipe(rewrite(captured("deepseek_v2"), plan), plan.host) if s.module == "fused_moe"]
    assert plan.cuda_graph
    assert {step.args["kept"] for step in steps} == {None}


def test_without_a_budget_steps_read_experts_over_the_bus_and_in_training_none(tmp_path: Path) -> None:
    assert {places for places, *_ in kept_by("", tmp_path)} == {0}
    assert {places for places, *_ in kept_by("mode = train", tmp_path)} == {None}
    assert {places for places, *_ in kept_by("layerwise_prefill = 1", tmp_path)} == {None}


def test_a_split_without_experts_that_go_elsewhere_is_told(tmp_path: Path) -> None:
    for program in (EXPERTS, EXPERTS + MANY):
        (told,) = without_effect(plan_of(program + "plan { experts_split = fixed }", tmp_path))
        assert "`plan { experts_split }` has no effect" in told
    assert not without_effect(plan_of(EXPERTS + MANY + STEPS.replace("SETTINGS", "experts_split = fixed"), tmp_path))


def test_a_split_that_is_chosen_has_an_effect(tmp_path: Path) -> None:
    program = rules(EXPERTS + "plan { mode = infer  auto = intensity  experts_split = fixed }", tmp_path)
    model, chosen = captured("deepseek_v2"), Choices({"": "cuda:0"}, ("cuda:0",), 1024)
    plan = make_plan(model, (), match(model, program, GPU), program, GPU, choices=chosen)
    kept = {step.args["kept"] for step in recipe(rewrite(model, plan), plan.host) if step.module == "fused_moe"}
    assert kept == {0} and not without_effect(plan)
