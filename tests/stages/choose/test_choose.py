"""The planner takes the fastest plan that fits, leaves to rules what they fix, and says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from families import CPU, captured, full_size

from ktc.foundation.host import Gpu, Host
from ktc.language import dsl
from ktc.language.dsl import RuleSet
from ktc.stages.capture import CapturedModel
from ktc.stages.choose import Case, Chosen, choose_plan, what_if
from ktc.stages.cost import work_of
from ktc.stages.match import match
from ktc.stages.plan import BatchShape
from ktc.stages.plan.kept import places_of

SERVER = replace(CPU, cores=16, threads=16, memory=1 << 40)
TRAINING = """
import "std/moe.ktr"
import "std/attention.ktr" as attn
rule experts { match moe.block => cpu_moe() }
rule attention { match attn.mla as a => lora_linear on a.q, a.kv_a, a.kv_b, a.o }
lora { rank = 8 alpha = 32 }
plan { mode = train auto = intensity }
"""


def with_gpus(count: int, size: int) -> Host:
    return replace(SERVER, gpus=tuple(Gpu("NVIDIA H100", size) for _ in range(count)))


@pytest.fixture(scope="module")
def v2_lite() -> CapturedModel:
    return full_size("deepseek-v2-lite")


def program(tmp_path: Path, text: str = TRAINING) -> RuleSet:
    path = tmp_path / "p.ktr"
    path.write_text(text)
    return dsl.load(path, {})


def chosen(model: CapturedModel, rules: RuleSet, host: Host, shape: BatchShape | None = None) -> Chosen:
    return choose_plan(model, (), match(model, rules, host), rules, host, shape or BatchShape())


def test_without_a_gpu_everything_is_on_the_cpu(tmp_path: Path) -> None:
    one = chosen(captured("deepseek_v2"), program(tmp_path), SERVER)
    assert [priced.candidate.name for priced in one.priced] == ["everything on the CPU"]
    assert one.plan.reasons[0].text.startswith("planned as `everything on the CPU`")


@pytest.mark.parametrize(
    ("size", "devices", "resident"),
    [
        (80 << 30, "experts of", 26), (24 << 30, "experts of", 16), (6 << 30, "experts of", 1),
        (1 << 29, "experts on the CPU, as much as fits", 0),
    ],
    ids=["80", "24", "6", "0.5"],
)  # fmt: skip
def test_more_memory_holds_more_layers(
    size: int, devices: str, resident: int, v2_lite: CapturedModel, tmp_path: Path
) -> None:
    one = chosen(v2_lite, program(tmp_path), with_gpus(1, size))
    assert one.best.candidate.name.startswith(devices)
    assert len(one.best.candidate.choices.resident) == pytest.approx(resident, abs=2)
    for memory in one.plan.devices:
        assert memory.budget is not None
        assert memory.weights + memory.adapter + memory.streaming <= memory.budget
    assert not one.plan.over_budget


def test_the_chosen_plan_is_predicted_to_be_the_fastest_that_fits(v2_lite: CapturedModel, tmp_path: Path) -> None:
    one = chosen(v2_lite, program(tmp_path), with_gpus(1, 24 << 30))
    fitting = [priced for priced in one.priced if not priced.lacks]
    assert one.best.seconds <= 1.01 * min(priced.seconds for priced in fitting)
    assert any(priced.lacks for priced in one.priced)  # the whole model
    assert all(priced.seconds > 0 for priced in fitting)


def test_a_rule_that_places_wins(v2_lite: CapturedModel, tmp_path: Path) -> None:
    fixed = TRAINING + 'rule all { match module at "*" => place(cpu) }\n'
    one = chosen(v2_lite, program(tmp_path, fixed), with_gpus(1, 80 << 30))
    assert {placement.device for placement in one.plan.placements} == {"cpu"}


def test_layers_are_on_several_gpus_in_turn_or_share_experts(v2_lite: CapturedModel, tmp_path: Path) -> None:
    one = chosen(v2_lite, program(tmp_path), with_gpus(2, 24 << 30))
    names = [priced.candidate.name for priced in one.priced if not priced.lacks]
    assert any("cuda:0 to cuda:1" in name for name in names)
    assert {memory.device for memory in one.plan.devices} >= {"cuda:0", "cuda:1"}


def test_a_program_without_auto_decides_everything_itself(v2_lite: CapturedModel) -> None:
    rules = dsl.load("moe-lora", {})
    assert chosen(v2_lite, rules, with_gpus(1, 80 << 30)).priced == ()


def test_other_budgets_and_lengths_are_cases(v2_lite: CapturedModel, tmp_path: Path) -> None:
    rules, host = program(tmp_path), with_gpus(1, 80 << 30)
    cases = [
        Case("a", host, {"cuda:0": size}, BatchShape(1, length)) for size in (4 << 30, 70 << 30) for length in (8, 4096)
    ]
    rows = [(case, one) for case, one in what_if(v2_lite, (), rules, cases) if isinstance(one, Chosen)]
    assert [case for case, _ in rows] == cases
    speeds = [one.best.predictions[0].tokens_per_second for _, one in rows]
    assert speeds[1] < speeds[3]  # more memory
    assert {one.best.predictions[0].use.length for _, one in rows} == {8, 4096}


def test_activations_that_do_not_fit_leave_less_room_for_weights(v2_lite: CapturedModel, tmp_path: Path) -> None:
    one = chosen(v2_lite, program(tmp_path), with_gpus(1, 3 << 30), BatchShape(1, 1024))
    assert any(memory.device == "cuda:0" for memory in one.plan.devices)
    assert not one.plan.over_budget


def test_what_is_too_large_for_one_gpu_is_on_several_in_turn(v2_lite: CapturedModel, tmp_path: Path) -> None:
    one = chosen(v2_lite, program(tmp_path), with_gpus(2, 2 << 30))
    assert any("in turn" in priced.candidate.name and not priced.lacks for priced in one.priced)
    assert {"cuda:0", "cuda:1"} <= {memory.device for memory in one.plan.devices}


def test_one_process_per_gpu_is_a_candidate(v2_lite: CapturedModel, tmp_path: Path) -> None:
    rules = program(tmp_path)
    assert chosen(v2_lite, rules, with_gpus(1, 80 << 30)).processes is None
    both = chosen(v2_lite, rules, with_gpus(2, 80 << 30))
    assert both.processes is not None and both.processes.count == both.plan.processes == 2
    assert both.best.candidate.name == f"a process on each of 2 GPUs: {both.processes.candidate}"
    assert {memory.device for memory in both.plan.devices if memory.weights} <= {"cpu", "cuda:0"}, "a plan for one"
    one = next(each for each in both.priced if each.candidate.name == both.processes.candidate)
    assert both.processes.tokens == one.predictions[-1].use.tokens
    assert one.seconds / 2 < both.processes.seconds < one.seconds
    parameters = sum(work.adapter for work in work_of(v2_lite, both.plan))
    assert both.processes.sent == pytest.approx(4 * parameters, rel=0.01)  # half of each gradient, out and back


@pytest.mark.parametrize(
    "second", [Gpu("NVIDIA H100", 80 << 30, taken=79 << 30), Gpu("NVIDIA A100", 80 << 30), Gpu("NVIDIA H100", 40 << 30)]
)
def test_processes_need_gpus_alike_and_each_with_room(second: Gpu, v2_lite: CapturedModel, tmp_path: Path) -> None:
    host = replace(SERVER, gpus=(Gpu("NVIDIA H100", 80 << 30), second))
    one = chosen(v2_lite, program(tmp_path), host)
    assert one.processes is None and one.plan.processes == 1


ANSWERING = """
import "std/moe.ktr"
rule experts { match moe.block => cpu_moe() }
plan { mode = MODE auto = intensity }
"""


@pytest.mark.parametrize(
    ("size", "mode", "single", "layers"),
    [(12 << 30, "infer", True, 0), (12 << 30, "serve", False, 7), (80 << 30, "infer", False, 26)],
)
def test_a_gpu_for_some_experts_has_places_for_answers_and_layers_for_a_server(
    size: int, mode: str, single: bool, layers: int, v2_lite: CapturedModel, tmp_path: Path
) -> None:
    one = chosen(v2_lite, program(tmp_path, ANSWERING.replace("MODE", mode)), with_gpus(1, size))
    name, places = one.best.candidate.name, places_of(one.plan)
    if single:
        assert name == "single experts on cuda:0, as many as fit"
        assert places is not None and 300 < places[0] < places[1] == 26 * 64
        assert any("bus and the CPU at once" in reason.text for reason in one.plan.reasons)
    elif layers == 26:
        assert places is None and name == "experts of 26 layers on cuda:0"
    else:
        assert len(one.best.candidate.choices.resident) == pytest.approx(layers, abs=2)
    for memory in one.plan.devices:
        assert memory.budget is None or memory.weights + memory.streaming <= memory.budget


def test_whole_layers_stay_for_batches_that_no_step_splits(v2_lite: CapturedModel, tmp_path: Path) -> None:
    rules = program(tmp_path, ANSWERING.replace("MODE", "infer"))
    one = chosen(v2_lite, rules, with_gpus(1, 24 << 30), BatchShape(32, 512))
    assert one.best.candidate.choices.resident
    assert one.best.seconds == min(priced.seconds for priced in one.priced if not priced.lacks)
