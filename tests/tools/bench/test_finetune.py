"""`ktc bench finetune`: real steps of a config alone, refusals with numbers, and a peer that says why it is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from places import CONFIGS
from rich.console import Console

from ktc import compiler
from ktc.cli import app as cli
from ktc.diagnostics import HostLacks, InputRefused
from ktc.model import twin
from ktc.stages.plan.placement import gib
from ktc.tools.bench.finetune import memory
from ktc.tools.bench.finetune.report import FinetuneReport, Row, Split, marked, median_step, not_measured, whole_depth
from ktc.tools.bench.options import parse
from ktc.tools.bench.peers import peer
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import tables
from ktc.tools.bench.requests import Finetune
from ktc.tools.bench.stack import Stack, stack_of
from ktc.training.trainers.run_report import StreamTraffic

Run = Callable[..., tuple[int, str, str]]
hf, stock = peer("finetune"), peer("stock")
SILENT = ProgressSink(lambda *_: None, lambda *_: None, lambda *_: None)


def asked(gpus: int, **typed: Any) -> Finetune:
    """Return the request of typed words on a machine with this number of GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        return parse(Finetune, {"model": "m", **typed})


SMALL = ("--random-weights", "--length", "32", "--accumulation", "4", "--steps", "2")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(*options)` is `ktc bench finetune`: its exit code, stdout and stderr."""

    def call(*options: object) -> tuple[int, str, str]:
        code = cli.main(["bench", "finetune", *map(str, options)])
        return (code, *capfd.readouterr())

    return call


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the proof, which takes seconds and is the subject of other tests."""
    monkeypatch.setattr("ktc.compiler.proven", lambda analysis, observe: (analysis, ()))


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a folder with the config of a small DeepSeek-V2, without weights."""
    folder = tmp_path / "config_only"
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "unproven")
def test_steps_of_a_config_alone_are_measured(run: Run, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    drawn, trace = tmp_path / "curves.svg", tmp_path / "step.json"
    told = ("-o", file, "--plot", drawn, "--trace", trace, "--json")
    places = ("--layers", 2, "--steps", 3, "--impl", "ktc,hf", "--experts", "reference,cpu")
    code, out, err = run("--config", config, *SMALL, *places, *told)
    assert code == 0, err
    found = json.loads(out)
    assert json.loads(file.read_text()) == {key: value for key, value in found.items() if key != "diagnostics"}
    row, reference = found["rows"]
    assert (found["layers"], found["depth"], found["tokens_per_step"]) == (2, 3, 128)
    assert (row["impl"], row["experts"], row["best"]) == ("ktc", "cpu", True)
    assert len(row["step_times"]) == len(row["losses"]) == 3
    assert row["tokens_per_second"] == pytest.approx(128 / row["step_times"][1])  # the third is traced
    assert (row["streams"], row["offload"]) == ([], "")
    assert (reference["experts"], reference["best"], reference["whole_depth"]) == ("reference", False, None)
    assert "one by one" in reference["stacking"]
    # The weights, adapter and tokens are the same: only rounding to bf16 differs.
    assert row["losses"] == pytest.approx(reference["losses"], rel=1e-4)
    assert row["losses"] != reference["losses"]
    assert row["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-2)
    assert found["notes"][0].startswith("dropout is 0 instead of 0.1")
    assert drawn.read_text().count(">ktc, experts on the CPU<") == 1
    for place in ("cpu", "reference"):
        events = json.loads((tmp_path / f"step-{place}.json").read_text())["traceEvents"]
        assert any(event.get("cat") == "cpu_op" for event in events)
    assert row["phases"]["forward"] > 0
    assert "stack" in row["stacking"]
    assert row["whole_depth"]["step_time"] == pytest.approx(2 * row["step_time"])  # 1 of 2 layers with experts
    assert {each["impl"]: each["reason"] for each in found["left_out"]} == {
        "hf": "it needs a GPU, and this process sees none"
    }
    for said in (
        "experts on the cpu: step 1 of 3",
        "the reference: step 3 of 3",
        "weights: ",
        "extrapolated to 3 layers, by those with experts",
    ):
        assert said in err


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"])


@pytest.mark.usefixtures("one_thread")
def test_the_peer_measures_every_split_of_the_same_step(config: Path) -> None:
    request = asked(0, model=str(config), random_weights=True, length=16, accumulation=8, steps=2)
    stack = stack_of(request.model, request.layers, config.parent / "cut")
    rows = [each for each in hf.measured(request, stack, lora(), SILENT, "cpu") if isinstance(each, Row)]
    assert [row.split for row in rows] == list(hf.splits(8))
    assert len({row.split for row in rows}) == 4
    first = [row.losses[0] for row in rows]  # of the same tokens, on weights that have hardly changed
    assert first == pytest.approx([first[0]] * 4, rel=1e-2)
    assert sum(row.best for row in marked(rows)) == 1


def test_a_split_that_runs_out_of_memory_is_told(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(model: object, optimizer: object, request: Finetune, split: Split, *_: object) -> Row:
        if split.batch == 8 and not split.checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
        return ROW

    monkeypatch.setattr(hf, "_row", row)
    request = asked(0, model=str(config), random_weights=True, length=16, accumulation=8, steps=2)
    stack = stack_of(request.model, request.layers, config.parent / "cut")
    found = list(hf.measured(request, stack, lora(), SILENT, "cpu"))
    assert found[-1] == not_measured("CUDA out of memory. Tried", "batch 8 x 1")
    assert found[:-1] == [ROW] * 3


def test_a_peer_larger_than_the_gpu_is_left_out(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 10))
    reason = stock.reason_against(Stack(config, 3, 3, 2, 2))
    assert reason.startswith("its weights need ")
    assert reason.endswith("and the GPU has 1.0 KiB")


def test_a_model_that_does_not_fit_is_refused_with_the_layers_that_would(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(0, model=str(config), random_weights=True, length=16, accumulation=1, steps=2)
    reading = compiler.Reading(random_weights=True, to_compile=True)
    analysis = compiler.analyse(config, "moe-lora", {"device": "cpu"}, reading=reading)
    memory.require_room(analysis, request)
    rest, layers = memory._bytes(analysis, request)
    held = sum(each.weights + each.adapter for each in analysis.plan.devices)
    assert len(layers) == 3
    saved = 2 * 2 * 16 * 64  # two layers of experts, bf16
    assert rest["cpu"] + sum(layer["cpu"] for layer in layers) == held + saved
    for count in (2, 0):
        free = rest["cpu"] + sum(layer["cpu"] for layer in layers[:count]) + 1
        monkeypatch.setattr(memory, "_free", lambda analysis, free=free: {"cpu": free})
        with pytest.raises(HostLacks) as refusal:
            memory.require_room(analysis, request)
        (diagnostic,) = refusal.value.diagnostics
        assert diagnostic.code == "H240"
        assert (
            f"3 layers of this model need {gib(held + saved)} on `cpu`, and {gib(free)} are free" in diagnostic.message
        )
        assert ("`--layers 2` would fit" if count else "not one layer fits") in diagnostic.hint


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"layers": 3}, "`--layers` is for `--random-weights`"),
        ({"steps": 1}, "`--steps` is at least 2"),
        ({"settings": {"format": "int4"}, "weight_format": "fp8"}, "name two formats"),
        ({"experts": "gpus"}, "`--experts` knows no `gpus`"),
        ({"impls": "kt"}, "`--impl` knows no `kt`"),
        ({"steps": 2, "trace": Path("step.json")}, "`--trace` needs `--steps 3`"),
    ],
)
def test_what_makes_no_sense_is_refused(typed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        asked(1, **typed)


def test_experts_are_streamed_where_there_is_a_gpu_and_a_program_for_it() -> None:
    assert asked(0, weight_format="int4").experts == ("cpu",)
    request = asked(1, weight_format="int4")
    assert (request.experts, request.settings) == (("gpu",), {"format": "int4", "prefill": "auto"})
    assert asked(1, settings={"prefill": "cpu"}).experts == ("cpu",)
    assert asked(1, experts="gpu, cpu", impls="hf,ktc").experts == ("gpu", "cpu")
    with pytest.raises(HostLacks, match="H244"):
        asked(0, experts="gpu")


def test_rows_that_are_compared_have_no_dropout_and_traces_of_their_own() -> None:
    alone = asked(0, experts="cpu", trace=Path("a/step.json"))
    assert (alone.compared, alone.trace_of("cpu")) == (False, Path("a/step.json"))
    both = asked(1, experts="gpu,reference", trace=Path("a/step.json"))
    assert (both.compared, both.trace_of("gpu")) == (True, Path("a/step-gpu.json"))
    assert asked(0, experts="cpu", plot=Path("curves.svg")).compared
    assert alone.trace_of("cpu") and asked(0, experts="cpu").trace_of("cpu") is None


@pytest.mark.parametrize("option", ["--plot", "--trace"])
def test_files_that_cannot_be_written_are_refused_before_the_run(run: Run, option: str, tmp_path: Path) -> None:
    file = tmp_path / "both.svg"
    (tmp_path / "a_file").touch()
    code, _, err = run("--config", "tiny:qwen3_moe", "--experts", "cpu", option, file, "-o", file)
    assert (code, "U030" in err, "name two files" in err) == (2, True, True)
    code, _, err = run("--config", "tiny:qwen3_moe", "--experts", "cpu", option, tmp_path / "a_file" / "here.svg")
    assert (code, "U003" in err) == (2, True)


def test_a_plot_has_a_known_ending(run: Run) -> None:
    code, _, err = run("--config", "tiny:qwen3_moe", "--experts", "cpu", "--plot", "curves.pdf")
    assert (code, "cannot draw `curves.pdf`" in err) == (2, True)


@pytest.mark.parametrize(
    ("layers", "message"), [(62, "the model has 61"), (3, "the first layer with experts is number 4")]
)
def test_a_number_of_layers_that_measures_nothing_is_refused(layers: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=message):
        stack_of(str(CONFIGS / "deepseek-v3"), layers, tmp_path / "cut")


def test_the_first_layers_of_a_published_model_keep_their_sizes(tmp_path: Path) -> None:
    stack = stack_of(str(CONFIGS / "deepseek-v3"), 5, tmp_path / "cut")
    assert (stack.depth, stack.with_experts, stack.with_experts_of_depth, stack.times_whole) == (61, 2, 58, 29)
    cut, whole = (
        json.loads((Path(each) / "config.json").read_text()) for each in (stack.model, CONFIGS / "deepseek-v3")
    )
    changed = {name for name in whole if cut[name] != whole[name]}
    assert changed <= {"num_hidden_layers", "num_nextn_predict_layers"}
    assert cut["num_hidden_layers"] == 5


def test_lists_by_layer_are_cut_too() -> None:
    settings = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "mlp_only_layers": [0, 3], "hidden": 7}
    cut = {"num_hidden_layers": 2, "layer_types": ["a", "b"], "mlp_only_layers": [0], "hidden": 7}
    assert twin.first_layers(settings, 2) == cut
    assert twin.layers_with_experts(settings) == [1, 2]


ROW = Row(
    impl="hf", experts="resident", split=Split(4, 4), tokens_per_second=4096.0, step_time=2.0,
    step_times=(9.0, 2.0, 2.0), gpu_allocated=34_600_000_000, gpu_reserved=36_000_000_000, host_peak_rss=5_000_000_000,
    losses=(11.5, 11.25), phases={},
)  # fmt: skip


def test_the_table_is_what_a_person_reads(golden: Callable[[str, str], None]) -> None:
    streamed = replace(
        ROW, impl="ktc", experts="gpu", split=Split(1, 16), step_time=1.0, tokens_per_second=8192.0,
        gpu_allocated=6_000_000_000, phases={"data": 0.0, "forward": 0.4, "backward": 0.6}, stacking="16 stacked",
        offload="grouped products", grad_norms=(1.0, 2.0),
        streams=(StreamTraffic("cuda:0", 2e10, 1e9, 4e10, 5e10, 0.4, 0.1),),
    )  # fmt: skip
    rows = [
        whole_depth(each, 27, 2.0) for each in (streamed, ROW, replace(ROW, split=Split(16, 1, True), step_time=3.0))
    ] + [replace(streamed, experts="reference", losses=(11.5, 11.0), streams=(), offload="", grad_norms=(1.0, 1.9))]
    machine = {"gpus": "a GPU", "cpu": "a CPU", "cores": "16", "isa": "amx"}
    left_out = (not_measured("CUDA out of memory.", "batch 16 x 1"),)
    report = FinetuneReport(
        machine=machine, request={}, layers=14, depth=27, tokens_per_step=8192, seconds={}, rows=marked(rows),
        left_out=left_out, notes=("dropout is 0",),
    )  # fmt: skip
    console = Console(file=StringIO(), width=120)
    console.print(tables(report))
    text: Any = console.file
    golden("finetune_table.txt", "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")


def test_the_first_step_is_not_counted() -> None:
    assert median_step((9.0, 1.0, 4.0, 2.0)) == 2.0
    assert median_step((9.0, 1.0, 4.0, 2.0), traced=3) == 1.5
