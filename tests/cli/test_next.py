"""A command that succeeds ends with a line that has the command that usually follows, and that line runs."""

from __future__ import annotations

import inspect
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from places import ROOT, TESTS

from ktc.cli import app as cli
from ktc.language.dsl import load

LINES = {
    "check moe-lora": "next: ktc check moe-lora tiny:deepseek_v2",
    "check PLACE/a.ktr": "next: ktc fmt PLACE/a.ktr",
    "fmt PLACE/a.ktr": "next: ktc check PLACE/a.ktr",
    "fmt PLACE": "next: ktc check PLACE/a.ktr",
    "graph tiny:qwen3_moe -o PLACE/graph.txt": "next: ktc check moe-lora tiny:qwen3_moe",
}


@pytest.mark.parametrize("command", LINES)
def test_the_last_line_is_the_next_command(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ktr").write_text("# Nothing but a comment is a program too.\n")
    code = cli.main(command.replace("PLACE", str(tmp_path)).split())
    said = capfd.readouterr()
    last = said.err.splitlines()[-1]
    assert (code, last) == (0, LINES[command].replace("PLACE", str(tmp_path)))


def test_quiet_commands_and_failures_have_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "moe-lora", "-q"]) == 0
    assert cli.main(["check", str(tmp_path / "missing.ktr")]) == 2
    assert "next:" not in capfd.readouterr().err


def test_every_command_has_one() -> None:
    groups = [("", cli.app), *((f"{group.name} ", group.typer_instance) for group in cli.app.registered_groups)]
    files = {
        f"{prefix}{command.name}": Path(inspect.unwrap(command.callback).__code__.co_filename)
        for prefix, group in groups
        if isinstance(group, typer.Typer)
        for command in group.registered_commands
        if command.callback is not None
    }
    assert len(files) > 20
    silent = {name for name, file in files.items() if "session.next(" not in file.read_text()}
    assert silent == {"census", "serve"}  # that of `census` is beside its table; `serve` ends by an interrupt


# Each line, run as it is printed ------------------------------------------------------------------------------------
SHAPE = "--shape custom --hidden 128 --intermediate 64 --experts 8 --top-k 2 --tokens 1 --rounds 1"
FIRST = (
    "doctor",
    *(f"check {path.stem}" for path in sorted((ROOT / "rules").glob("*.ktr"))),
    "fmt rules.ktr",
    "graph tiny:deepseek_v2",
    "compile tiny:deepseek_v2 moe-lora -o made",
    "compile tiny:qwen3_moe moe-inference -o answers",
    "train tiny:qwen3_moe --data capitals --max-steps 1 --accumulation 2 -o first",
    "graph made",
    "pack made",
    "prove made --layers 0",
    "consistency made --sequences 1 --tokens 16 --prompt 8",
    "train made --data capitals --max-steps 1 --accumulation 2 -o run",
    "eval made --adapter run --data capitals --limit 1 --max-new-tokens 2",
    "export run --layout per-expert -o exported",
    "export run",
    "export run --model made -o elsewhere",
    "merge made run -o merged",
    "quantize merged --scheme int4-channel -o int4",
    "export --gguf merged -o model.gguf",
    "census --family qwen3_moe",
    "import-kt-yaml optimize.yaml tiny:deepseek_v2",
    f"bench moe {SHAPE} --impl ktc_bf16",
    "bench finetune --config tiny:qwen3_moe --random-weights --length 16 --accumulation 1 --steps 2 --impl ktc",
    "bench generate --config tiny:deepseek_v2 --batch 1 --context 8 --steps 8 --impl eager",
)


@pytest.mark.full
def test_every_next_line_runs_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run commands of all kinds, then whatever each names as the next one, and so on, until none is new."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # a conversation that ends at once
    (tmp_path / "rules.ktr").write_text("# Nothing but a comment is a program too.\n")
    shutil.copy(TESTS / "tools" / "kt_yaml" / "deepseek_v2.yaml", tmp_path / "optimize.yaml")
    waiting, seen, failed = [shlex.split(line) for line in FIRST], list[list[str]](), list[str]()
    while waiting:
        words = waiting.pop(0)
        if words in seen:
            continue
        seen.append(words)
        code = _serve(words) if words[0] == "serve" else cli.main(words)
        said = capfd.readouterr().err
        with capfd.disabled():
            print(f"\n{code} ktc {shlex.join(words)}", end="")
        if code != 0:
            failed.append(f"ktc {shlex.join(words)}: exit {code}\n{said[-600:]}")
        elif found := re.findall(r"^next: ktc (.*)$", said, re.MULTILINE):
            waiting.insert(0, shlex.split(found[-1]))
    assert not failed, "\n\n".join(failed)


def _serve(words: list[str]) -> int:
    """Start the server, wait for its address, and end it as Ctrl-C does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ktc", *words, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        said = ""
        for line in server.stderr:
            said += line
            if "is served at" in line:
                server.send_signal(signal.SIGINT)
        return 0 if "is served at" in said and server.wait() in (0, 130) else 1


# Quiet ---------------------------------------------------------------------------------------------------------------
def test_quiet_leaves_out_no_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ktr").write_text("#   a comment\nrule   x {match linear => keep(quant)}\n")
    for command in ("check moe-lora", f"fmt --check {tmp_path / 'a.ktr'}", "explain E042 "):
        told = []
        for quiet in ([], ["-q"]) if not command.startswith("explain") else ([], []):
            cli.main([*command.split(), *quiet])
            told.append(capfd.readouterr())
        assert told[0].out == told[1].out != "", command
        assert "next:" not in told[1].err


@pytest.mark.slow
def test_quiet_measurements_and_plans_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for command in (f"bench moe {SHAPE} --impl hf_eager -q", "doctor -q", "check moe-lora tiny:qwen3_moe -q"):
        assert cli.main(command.split()) == 0
        said = capfd.readouterr()
        assert said.out.strip() != "", command
        assert said.err == ""


def test_every_bundled_program_without_a_next_line_needs_a_large_model() -> None:
    from ktc.cli.following import checking

    without = {p.stem for p in (ROOT / "rules").glob("*.ktr") if checking(load(p.stem, {}), p.stem) is None}
    assert without == {"moe-qat"}


# Models without a tokenizer -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("adapter", ["null", '{"r": 8}'])
def test_no_command_that_reads_text_follows_a_model_without_a_tokenizer(adapter: str, tmp_path: Path) -> None:
    from ktc.cli.following import after_compiling, answering

    (tmp_path / "lora.json").write_text(adapter)
    assert after_compiling(tmp_path)[:2] == ("ktc", "prove")
    assert answering(tmp_path)[:2] == ("ktc", "graph")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert after_compiling(tmp_path)[:2] == ("ktc", "chat" if adapter == "null" else "train")
    assert answering(tmp_path)[:2] == ("ktc", "chat")
