"""The commands on a real model: what they print, write and leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ktc.cli import app as cli
from ktc.cli.report import STAGES

Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("one_thread")
MODEL, RULES = "tiny:deepseek_v2", "moe-lora"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "cli_twin"
    assert cli.main(["compile", MODEL, RULES, "-o", str(out), "-q"]) == 0
    return out


def test_out_is_replaced_only_when_forced_and_compile_tells_stages_and_tables(run: Run, compiled: Path) -> None:
    assert run("compile", MODEL, RULES, "-o", compiled)[0] == 2
    code, out, err = run("compile", MODEL, RULES, "-o", compiled, "--force")
    assert code == 0
    assert [line.split()[0] for line in err.splitlines() if line.startswith("  ")] == list(STAGES)
    for word in ("experts", "cpu_moe", "lora_linear", "fused_moe (silu)", "cpu", "LoRA r=8 alpha=32", "is ready"):
        assert word in out


def test_quiet_json_is_the_whole_record_and_nothing_else(run: Run, tmp_path: Path) -> None:
    code, out, err = run("compile", MODEL, RULES, "-o", tmp_path / "cli_twin", "--json", "-q")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["out"] == str(tmp_path / "cli_twin")
    assert {"matches", "near_misses", "plan", "proofs", "seconds", "diagnostics"} <= report.keys()
    assert all(proof["holds"] for proof in report["proofs"])
    assert [found["code"] for found in report["diagnostics"]] == ["A613"]  # of the adapter's latent keys


def test_check_shows_the_plan_from_the_config_alone(run: Run, tmp_path: Path, compiled: Path) -> None:
    config = json.loads((compiled / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("auto_map", "architectures")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run("check", "moe-lora", tmp_path, "--json")
    assert code == 0
    assert {row["device"] for row in json.loads(out)["plan"]["memory"]["devices"]} == {"cpu"}
    assert "takes LoRA" in run("check", "moe-lora", tmp_path)[1]


def test_check_for_a_machine_that_is_too_small_ends_with_three(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('memory = "1000KB"\ncores = 1\n')
    code, out, err = run("check", "moe-lora", MODEL, "--host", tmp_path / "small.toml")
    assert code == 3, err
    assert "cpu" in out
    assert "SHORT BY" in out


@pytest.mark.slow
def test_check_answers_whether_a_size_of_input_fits(run: Run, tmp_path: Path) -> None:
    (tmp_path / "host.toml").write_text('memory = "4GiB"\ncores = 1\n')
    asked = ("check", "moe-lora", MODEL, "--host", tmp_path / "host.toml", "--length", "256", "--batch", "100000")
    code, out, err = run(*asked)
    assert (code, "M075" in err, "checked in" in err) == (3, True, True), err
    for words in ("longest at batch 1", "train with gradient checkpointing", "infer", "a token meets"):
        assert words in out
    report = json.loads(run(*asked, "--json")[1])
    assert {"rules", "capture", "plan"} <= report["seconds"].keys()
    assert report["peak_rss"] > 0


def test_bad_rules_end_with_two_and_quote_the_line(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "bad.ktr"
    rules.write_text("rule experts {\n  match moe.blok\n  => cpu_moe()\n}\n")
    code, _, err = run("check", rules)
    assert code == 2
    assert f" --> {rules}:2:9" in err
    assert "   2 |   match moe.blok" in err
    code, out, _ = run("check", rules, "--json")
    (found,) = json.loads(out)["diagnostics"]
    assert (found["line"], found["column"], found["severity"]) == (2, 9, "error")


@pytest.mark.parametrize("stage", ["captured", "matched", "planned", "rewritten"])
def test_every_stage_of_a_compiled_model_can_be_shown(run: Run, compiled: Path, stage: str) -> None:
    code, out, _ = run("graph", compiled, "--stage", stage)
    assert code == 0
    assert f"{stage}\n" in out.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("form", "start"),
    [("json", "{"), ("dot", "digraph"), ("svg", "<svg"), ("html", "<!doctype html>"), ("text", "deepseek")],
)
def test_every_form_can_be_written(run: Run, compiled: Path, tmp_path: Path, form: str, start: str) -> None:
    target = tmp_path / "new" / "graph"
    code, out, _ = run("graph", compiled, "--format", form, "-o", target)
    assert (code, out) == (0, "")
    assert target.read_text().lower().startswith(start)


def test_a_model_that_is_not_compiled_can_be_shown(run: Run) -> None:
    code, out, _ = run("graph", MODEL, "--layer", "1")
    assert code == 0
    assert "cpu_moe" in out or "fused_moe" in out


def test_the_difference_of_two_stages_names_the_rules(run: Run, compiled: Path) -> None:
    code, out, _ = run("graph", compiled, "--diff", "captured", "rewritten")
    assert code == 0
    assert "experts" in out
    assert run("graph", "--diff", compiled, compiled)[1].strip().endswith("no difference")
    assert "before" in json.loads(run("graph", compiled, "--diff", "captured", "rewritten", "--format", "json")[1])


def test_graph_refuses_what_is_not_there(run: Run, compiled: Path) -> None:
    assert "the model has no layer 99: its layers are 0 to 2" in run("graph", compiled, "--layer", "99")[2]
    assert "needs a MODEL" in run("graph")[2]
    assert "is written as text or json" in run("graph", compiled, "--diff", "captured", "matched", "--format", "svg")[2]
    assert run("graph", "captured-no-such-model")[0] == 2


def test_an_interrupt_that_c_code_met_ends_with_130_too(tmp_path: Path) -> None:
    lines = ["import ctypes, ktc.cli.app", "ctypes.pythonapi.PyRun_SimpleString(b'raise KeyboardInterrupt')"]
    (tmp_path / "met.py").write_text("\n".join([*lines, "ktc.cli.app.main = lambda: 130", "ktc.cli.app.run()"]))
    places = os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[2])])
    ended = subprocess.run(
        [sys.executable, "-m", "met"], check=False, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": places}
    )
    assert ended.returncode == 130


def test_an_interrupted_compilation_ends_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "cli_twin"
    command = [sys.executable, "-m", "ktc", "compile", MODEL, RULES, "-o", str(out)]
    environment = {**os.environ, "KTC_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        assert "rules" in process.stderr.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []
