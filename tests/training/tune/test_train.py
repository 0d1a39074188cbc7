"""`ktc train` end to end on a small model: it learns, says what it took, goes on, and its adapter works elsewhere."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from browser import complaints, opened_browser, overflow, resize
from peft import PeftModel
from places import ROOT
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

import ktc
from ktc.cli import app as cli
from ktc.diagnostics import HostLacks, InputRefused
from ktc.training.trainers.run_report import Logged
from ktc.training.tune import run_folder
from ktc.training.tune.plots import loss_plot, smoothed
from ktc.training.tune.tokenised import TokenisedData
from ktc.training.tune.train import run, settings_for, started_again
from ktc.training.tune.types import RunPaths, TrainResult

pytestmark = pytest.mark.usefixtures("one_thread")

FACTS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid"}
SETTINGS: dict[str, Any] = {
    "max_steps": 4, "accumulation": 2, "learning_rate": 1e-2, "warmup": 0.0, "scheduler": "constant", "save_steps": 2,
    "eval_steps": 2, "eval_split": 0.25, "precision": "fp32", "length": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"instruction": f"What is the capital of {c}?", "output": f"It is {city}."} for c, city in FACTS.items()]
    path = tmp_path_factory.mktemp("data") / "capitals.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="module")
def done(out: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run in the reference mode, with dropout, whose third step is traced."""
    runs = tmp_path_factory.mktemp("runs")
    return ktc.train(out, data, output=runs / "whole", trace=runs / "trace.json", **SETTINGS)


def report_of(result: TrainResult) -> dict[str, Any]:
    return json.loads((result.output / "ktc_report.json").read_text())


def losses_of(model: nn.Module, data: TokenisedData) -> list[tuple[float, int]]:
    """The summed loss and the number of learned tokens of each row."""
    found: list[tuple[float, int]] = []
    for ids, labels in zip(data.input_ids, map(torch.tensor, data.labels), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        loss = functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        found.append((float(loss), int((labels[1:] != -100).sum())))
    return found


def test_losses_are_those_of_the_stock_model_before_and_after(done: TrainResult, out: Path) -> None:
    """A step has two of the three rows, whose order is the seed's."""
    source = json.loads((out / "ktc.json").read_text())["model"]["folder"]
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval()
    losses = [each.loss for each in done.report.history if each.loss is not None]
    held_out = [each.eval_loss for each in done.report.history if each.eval_loss is not None]
    assert (len(losses), len(held_out)) == (4, 2)
    pairs = combinations(losses_of(stock, done.data.train), 2)
    first = [(one + other) / (tokens + more) for (one, tokens), (other, more) in pairs]
    assert any(losses[0] == pytest.approx(each, abs=1e-4) for each in first), (losses[0], first)
    assert done.data.held_out is not None
    ((loss, tokens),) = losses_of(PeftModel.from_pretrained(stock, done.output).eval(), done.data.held_out)
    assert held_out[-1] == pytest.approx(loss / tokens, abs=1e-4)
    assert held_out[-1] < held_out[0]


def test_the_adapter_gives_the_stock_model_the_same_logits(done: TrainResult, out: Path) -> None:
    from ktc.adapters.adapter import attach

    source = json.loads((out / "ktc.json").read_text())["model"]["folder"]
    assert json.loads((done.output / "adapter_config.json").read_text())["base_model_name_or_path"] == source
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval()
    theirs = PeftModel.from_pretrained(stock, str(done.output)).eval()
    ours = attach(ktc.load(out, reference=True), done.output, alone=True).eval()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_the_settings_that_are_kept_give_the_run_again(done: TrainResult, out: Path) -> None:
    kept = run_folder.SETTINGS
    again = settings_for(RunPaths(out, done.output.with_name("again")), done.output / kept, {})
    assert (done.output / kept).read_text().partition("\n")[2] == again.to_yaml(), "after a line about its data"
    assert (again.max_steps, again.precision) == (4, "fp32")


def test_a_step_is_traced_and_drawn(done: TrainResult, out: Path, data: Path, tmp_path: Path) -> None:
    events = json.loads((done.output.parent / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)
    assert "The timeline of a step" in (done.output / "report.html").read_text()
    assert (done.output / "timeline.svg").is_file()
    with pytest.raises(InputRefused, match="U003"):
        ktc.train(out, data, output=tmp_path / "run", trace=data / "trace.json", **SETTINGS)


def test_the_report_is_a_page_that_needs_nothing_else(done: TrainResult) -> None:
    page = (done.output / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"<script|<link|(src|href)\s*=\s*\"(?!#)", page)
    assert report_of(done)["steps"] == 4


def test_the_card_has_what_others_need_and_no_path_of_the_machine(done: TrainResult, data: Path) -> None:
    card = (done.output / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    base = Path(report_of(done)["model"]).name
    assert yaml.safe_load(front) == {
        "base_model": base, "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["lora", "ktc", "sft"],
    }  # fmt: skip
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    assert text.count(f"| capitals.jsonl | alpaca | 4 | 1 | capitals.jsonl | {digest} |") == 1
    assert "- held out: 1 rows of these sources, by `eval_split: 0.25`" in text
    assert f"from_pretrained({base!r})" in text
    assert "learning_rate: 0.01" in text
    assert f"| steps | {report_of(done)['steps']} " in text
    assert not re.search(r"(^|[\s`'\"])/\w+/", card)
    assert Path.home().name not in card


def test_a_package_that_would_report_is_named_before_the_model_is_loaded(out: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(HostLacks, match=r"H246.*`mlflow`"):
        ktc.train(out, data, output=tmp_path / "run", report_to=("mlflow",), **SETTINGS)
    assert not (tmp_path / "run").exists()


def test_the_report_has_an_answer_before_and_after_and_no_empty_lengths(done: TrainResult) -> None:
    page = (done.output / "report.html").read_text()
    for title in ("A sample answer", "before the training", "after the training", "in the data", "held-out row"):
        assert title in page
    assert "capital of" in page
    rows = re.findall(r"tokens</td><td class=\"n\">(\d+)</td>", page)
    assert rows and "0" not in rows


@pytest.mark.slow
def test_the_report_fits_any_width(done: TrainResult) -> None:
    with opened_browser() as browser:
        for width in (400, 800, 1400):
            resize(browser, width)
            browser.get((done.output / "report.html").as_uri())
            assert (overflow(browser) <= 0, complaints(browser)) == (True, [])


def test_a_curve_is_smoothed_unless_it_is_short() -> None:
    assert smoothed([1.0] * 9) == []
    assert smoothed([2.0] * 12) == pytest.approx([2.0] * 12)
    noisy = smoothed([1.0, 3.0] * 50 + [math.nan, math.inf])
    assert len(noisy) == 102 and all(1.7 < mean < 2.3 for mean in noisy[20:])
    history = [Logged(step, loss=1.0 / step) for step in range(1, 30)]
    assert "training, smoothed" in loss_plot(history) and "smoothed" not in loss_plot(history[:5])


def test_a_streamed_run_learns_the_same(out: Path, data: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "max_steps": 2, "eval_split": 0.0, "eval_steps": None, "save_steps": None}
    kept, streamed = (ktc.train(out, data, output=tmp_path / str(on), streaming=on, **settings) for on in (False, True))
    assert [line.loss for line in streamed.report.history] == [line.loss for line in kept.report.history]


def test_a_run_that_was_stopped_goes_on_bit_for_bit(done: TrainResult, out: Path, data: Path, tmp_path: Path) -> None:
    paths = RunPaths(out, tmp_path / "stopped")
    settings = settings_for(paths, None, {**SETTINGS, "data": (str(data),)})
    asked = iter((False, False, True, False))
    first = run(paths, settings, stop=lambda: next(asked))
    assert first.interrupted
    assert not (paths.output / "adapter_config.json").exists()
    on = RunPaths(out, paths.output, resume="auto")
    second = run(on, settings_for(on, None, {}))
    assert not second.interrupted
    one, two = (load_file(each.output / "adapter_model.safetensors") for each in (done, second))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [each.loss for each in second.report.history] == [each.loss for each in done.report.history]
    for name, value, was in (("rank", 4, "None"), ("learning_rate", 2e-2, "0.01"), ("weight_decay", 0.1, "0.0")):
        with pytest.raises(InputRefused, match=rf"T525.*`{name}` was `{was}`"):
            settings_for(on, None, {name: value})
    with pytest.warns(UserWarning, match="nothing was trained: the checkpoint has 4 steps, and the run has 4"):
        third = run(on, settings_for(on, None, {}))
    assert [each.loss for each in third.report.history] == [each.loss for each in done.report.history]


@pytest.mark.parametrize("steps", [{"max_steps": 3}, {"epochs": 1.5}], ids=["steps", "epochs"])
def test_a_run_that_ended_within_an_epoch_has_no_step_more(
    out: Path, data: Path, tmp_path: Path, steps: dict[str, Any]
) -> None:
    """An epoch of three rows has two steps."""
    settings = {name: value for name, value in SETTINGS.items() if name != "max_steps"}
    first = ktc.train(out, data, output=tmp_path, **{**settings, **steps, "save_steps": 1})
    assert first.report.steps == 3

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = contents()
    with pytest.warns(UserWarning, match="nothing was trained: the checkpoint has 3 steps, and the run has 3"):
        second = ktc.train(out, output=tmp_path, resume="auto", logging_steps=2)
    assert contents() == before
    assert second.report.steps == 3 and not second.interrupted
    for path in tmp_path.glob("adapter_*"):
        path.unlink()
    with pytest.warns(UserWarning, match="nothing was trained"):
        ktc.train(out, output=tmp_path, resume="auto")
    after = {path: content for path, content in contents().items() if path.suffix == ".safetensors"}
    assert after == {path: content for path, content in before.items() if path.suffix == ".safetensors"}
    third = ktc.train(out, output=tmp_path, resume="auto", max_steps=4)
    assert third.report.steps == 4


def test_a_run_is_resumed_on_the_same_rows_alone_and_with_other_intervals(
    out: Path, data: Path, tmp_path: Path
) -> None:
    changing, run_there = tmp_path / "rows.jsonl", tmp_path / "run"
    changing.write_text(data.read_text())
    ktc.train(out, changing, output=run_there, **{**SETTINGS, "max_steps": 2})
    kept = (run_there / "train.yaml").read_text()
    changing.write_text(data.read_text().replace("Paris", "Berlin"))
    with pytest.raises(
        InputRefused, match=r"T525.*began with other data: 3 rows, \d+ tokens, digest .*; now 3 rows"
    ) as refused:
        ktc.train(out, output=run_there, resume="auto", max_steps=4)
    assert "the tokenizer and its chat template" in str(refused.value)
    assert (run_there / "train.yaml").read_text() == kept
    changing.write_text(data.read_text())
    resumed = ktc.train(out, output=run_there, resume="auto", max_steps=5, save_steps=5, logging_steps=2)
    assert [line.step for line in resumed.report.history if line.loss is not None] == [1, 2, 4]
    assert sorted(path.name for path in run_there.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-5"]


def test_the_kernels_are_timed_and_phases_add_up_to_the_step(out: Path, data: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "precision": "bf16", "max_steps": 2, "packing": True, "eval_split": 0.0, "eval_steps": None}
    report = ktc.train(out, data, output=tmp_path / "kernels", **settings).report
    config = json.loads((out / "config.json").read_text())
    assert report.speed is not None
    assert sum(report.phases.values()) == pytest.approx(report.speed.step_time)
    assert min(report.phases.values()) >= 0
    layers, tokens = config["num_hidden_layers"], report.speed.tokens_per_step
    per_token = 6 * config["num_experts_per_tok"] * config["hidden_size"] * config["moe_intermediate_size"]
    for direction in ("moe_forward", "moe_backward"):
        of = report.experts[direction]
        assert of.token_layers == layers * tokens
        assert of.flops == per_token * of.token_layers
        assert 0 < of.seconds < report.speed.step_time
    assert report.trainable_parameters < report.total_parameters
    assert report.host_peak_rss > 2**20
    assert report.stacking


# Refused -------------------------------------------------------------------------------------------------------------
def test_a_damaged_checkpoint_is_left_out_and_an_earlier_one_taken(done: TrainResult, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(done.output, folder)
    assert run_folder.find_checkpoint(folder, "auto") == folder / "checkpoint-4"
    file = folder / "checkpoint-4" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:100])
    assert run_folder.find_checkpoint(folder, "auto") == folder / "checkpoint-2"
    with pytest.raises(InputRefused, match=r"T524.*optimizer.pt"):
        run_folder.find_checkpoint(folder, str(folder / "checkpoint-4"))
    claimed = run_folder.claim(folder, resume="auto")
    claimed.release()
    (warning,) = claimed.left_out
    assert (warning.code, warning.severity) == ("T536", "warning")
    assert "checkpoint-4" in warning.message and "optimizer.pt" in warning.message
    assert "checkpoint-2" in warning.hint
    (folder / "checkpoint-2" / "trainer_state.json").unlink()
    with pytest.raises(InputRefused, match=r"T524.*trainer_state.json"):
        run_folder.find_checkpoint(folder, str(folder / "checkpoint-2"))
    with pytest.raises(InputRefused, match="T524") as refused:
        run_folder.find_checkpoint(folder, "auto")
    assert "--force" in refused.value.diagnostics[0].hint


def test_a_folder_belongs_to_one_run(done: TrainResult, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(done.output, folder)
    with pytest.raises(InputRefused, match=r"T521.*already has a run"):
        run_folder.claim(folder)
    claimed = run_folder.claim(folder, force=True)
    assert [each.name for each in folder.iterdir()] == [".lock"]
    with pytest.raises(InputRefused, match="T522"):
        run_folder.claim(folder)
    claimed.release()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputRefused, match=r"T521.*not a run of ktc"):
        run_folder.claim(folder, force=True)
    with pytest.raises(InputRefused, match="T523"):
        run_folder.find_checkpoint(folder, "auto")


def test_a_folder_that_is_taken_is_refused_before_anything_is_loaded(
    out: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    monkeypatch.setattr("ktc.training.tune.prepare.read_tokenizer", None)  # not reached
    with pytest.raises(InputRefused, match="T521"):
        ktc.train(out, data, output=tmp_path, **SETTINGS)


def test_a_layer_that_is_not_there_is_refused_with_its_neighbour(out: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="T526") as refused:
        ktc.train(out, data, output=tmp_path / "targets", targets=("q_porj", "v_proj"), **SETTINGS)
    assert refused.value.diagnostics[0].hint == "did you mean `q_proj`?"
    assert not (tmp_path / "targets").exists()


def test_the_command_shows_the_data_and_refuses_what_is_too_long(
    out: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(out), "--data", str(data), "--dry-run", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)["data"]["train"]
    assert (shown["format"], shown["rows"], shown["template"]) == ("alpaca", 4, "chat")
    assert [text for text, learned in shown["first"] if learned] == ["It is Paris.<|end|>"]
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {data}\nlength: 16\n")
    assert cli.main(["train", str(out), "--config", str(config), "--dry-run"]) == 2
    assert "error[T517]" in capfd.readouterr().err
    assert cli.main(["train", str(out), "--data", str(data), "--length", "100000"]) == 2
    assert "error[T505]" in capfd.readouterr().err
    assert cli.main(["train", str(out)]) == 2
    assert "error[T504]" in capfd.readouterr().err


@pytest.mark.parametrize(("method", "batch", "first"), [("dpo", 1, math.log(2)), ("kto", 2, 0.5)])
def test_preferences_are_learned_by_the_trainers_of_trl(
    method: str, batch: int, first: float, out: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"What is the capital of {c}?", "chosen": f" {city}", "rejected": " none"}
        for c, city in FACTS.items()
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = {**SETTINGS, "max_steps": 3, "batch": batch, "accumulation": 1, "eval_steps": None, "eval_split": 0.0}
    result = ktc.train(out, file, output=tmp_path / method, method=method, **settings)
    losses = [line.loss for line in result.report.history if line.loss is not None]
    margins = [line.reward_margin for line in result.report.history if line.reward_margin is not None]
    assert losses[0] == pytest.approx(first, abs=1e-6)
    assert (margins[0], margins[-1] > 0) == (0, True)
    assert not (result.output / "ref").exists()
    assert run_folder.find_checkpoint(result.output, "auto").name == "checkpoint-3"
    assert (result.output / "adapter_model.safetensors").is_file()


def test_ctrl_c_ends_the_run_after_its_step_and_says_how_to_go_on(
    done: TrainResult, out: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def until_asked(paths: RunPaths, settings: object, *, observe: object, stop: Callable[[], bool]) -> TrainResult:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        return replace(done, interrupted=True)

    monkeypatch.setattr("ktc.training.tune.train.run", until_asked)
    assert cli.main(["train", str(out), "--data", str(data), "--output", "runs/first"]) == 130
    said = capfd.readouterr().err
    assert f"ktc train {out} --output runs/first --resume auto" in said
    assert "press Ctrl-C again" in said


@pytest.mark.slow
def test_two_processes_learn_what_one_does_and_the_first_speaks(out: Path, data: Path, tmp_path: Path) -> None:
    settings = ["--data", str(data), "--max-steps", "3", "--precision", "fp32", "--dropout", "0", "--length", "64"]
    found = {}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ways = {"one": ([], ["2"]), "torchrun": (torchrun, ["1"]), "ktc": ([], ["2", "--processes", "2"])}
    for name, (launcher, accumulation) in ways.items():
        command = ["-m", "ktc", "train", str(out), "--json", "--output", str(tmp_path / name), *settings]
        ended = subprocess.run(
            [sys.executable, *launcher, *command, "--accumulation", *accumulation],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        found[name] = json.loads(ended.stdout)["report"]
    assert [found[name]["processes"] for name in ways] == [1, 2, 2]
    assert "accumulation: 2" in (tmp_path / "ktc" / "train.yaml").read_text(), "of a step, for any number of processes"
    losses = [[each["loss"] for each in found[name]["history"]] for name in ways]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 2
    assert len({found[name]["speed"]["tokens_per_step"] for name in ways}) == 1


def test_missing_packages_are_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.foundation.versions.installed", lambda name: None if name in ("datasets", "trl") else "1")
    with pytest.raises(HostLacks, match="training requires `datasets`, `trl`") as refused:
        ktc.train(tmp_path / "missing", "missing.jsonl")
    assert refused.value.diagnostics[0].hint == "`pip install 'ktc[train]'`"


def test_a_run_that_failed_continues_only_in_the_folder_that_it_claimed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "out", tmp_path / "run", None, True)
    other = tmp_path / "smaller"
    (paths.output / "checkpoint-3").mkdir(parents=True)
    assert started_again(paths, other, claimed=False) == replace(paths, out=other)
    assert started_again(paths, other, claimed=True).resume == "auto"
    assert started_again(replace(paths, resume="run/checkpoint-1"), other, claimed=True).resume == "run/checkpoint-1"
    (paths.output / "checkpoint-3").rmdir()
    again = started_again(replace(paths, force=False), other, claimed=True)
    assert again.force and again.resume is None
