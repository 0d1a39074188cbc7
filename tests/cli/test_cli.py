"""The command line: its options are frozen, its exit codes and its JSON are a contract."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ktc.cli import app as cli
from ktc.cli.session import Session
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, ProofFailed
from ktc.foundation.files import new_folder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        print("a library prints something")
        raise error

    return fail


def test_options_are_frozen(golden: Callable[[str, str], None]) -> None:
    root: Any = typer.main.get_command(cli.app)
    lines: list[str] = []
    for name, sub in sorted(_commands("", root)):
        for parameter in sub.params:
            kind = "" if parameter.param_type_name == "option" else "argument "
            lines.append(
                f"ktc {name} {kind}{' '.join([*parameter.opts, *parameter.secondary_opts])}".replace("  ", " ")
            )
    golden("cli_options.txt", "\n".join(lines) + "\n")


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The command and, where it is a group, all below it, with their full names."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {word}".strip(), below)


def test_the_shell_completes_the_options_of_a_session(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = {"_KTC_COMPLETE": "complete_bash", "COMP_WORDS": "ktc pack --", "COMP_CWORD": "2"}
    for name, value in typed.items():
        monkeypatch.setenv(name, value)
    offered = run()[1].split()
    assert {"--weights", "--json", "--verbose", "--quiet", "--log-file"} <= set(offered)


def test_version_and_help_end_with_zero(run: Run) -> None:
    assert run("--version")[:2] == (0, "ktc 0.1.0\n")
    for command in ("compile", "check", "graph", "doctor"):
        assert run(command, "--help")[0] == 0
    assert run("bench", "moe", "--help")[0] == 0


def test_wrong_usage_ends_with_two(run: Run) -> None:
    assert run("compile")[0] == 2
    assert run("no-such-command")[0] == 2
    assert run("graph", "--format", "png", "x")[0] == 2


def test_wrong_usage_with_json_is_still_one_object(run: Run) -> None:
    code, out, _ = run("compile", "--json")
    assert code == 2
    assert json.loads(out)["diagnostics"][0]["code"] == "U001"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProofFailed(Diagnostic("P300", "it differs")), 1),
        (HostLacks(Diagnostic("H220", "no compiler")), 3),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("oops"), 1),
    ],
)
def test_exit_codes(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, code: int) -> None:
    monkeypatch.setattr("ktc.compiler.compile", raising(error))
    got, out, _ = run("compile", "tiny:deepseek_v2", "moe-lora", "-o", str(tmp_path / "m"), "--json")
    assert got == code
    assert [d["severity"] for d in json.loads(out)["diagnostics"]] == ["error"]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            MemoryError("cannot allocate 8,589,934,592 bytes for weights"),
            "U115]: too little memory on the host: 8.0 GiB",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."), "U116]: too little memory on the GPU: 2 GiB"),
        (RuntimeError("can't start new thread"), "U117]: the system starts no more threads"),
    ],
)
def test_too_little_memory_is_no_bug(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, found: str
) -> None:
    monkeypatch.setattr("ktc.compiler.compile", raising(error))
    code, out, err = run("compile", "tiny:deepseek_v2", "moe-lora", "-o", str(tmp_path / "m"))
    assert (code, out) == (HostLacks.exit_code, "")
    assert found in err and "bug" not in err


def test_a_bug_is_called_one_and_shows_its_trace_only_when_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ktc.compiler.compile", raising(ZeroDivisionError("oops")))
    arguments = ("compile", "tiny:deepseek_v2", "moe-lora", "-o", str(tmp_path / "m"))
    log = tmp_path / "log.txt"
    code, out, err = run(*arguments, "--log-file", str(log))
    assert (code, out) == (1, "")
    assert "this is a bug in ktc: ZeroDivisionError: oops" in err
    assert "Traceback" not in err
    assert "Traceback" in log.read_text()
    assert "Traceback" in run(*arguments, "-v")[2]


def test_settings_need_an_equals_sign(run: Run, tmp_path: Path) -> None:
    code, _, err = run("compile", "tiny:deepseek_v2", "moe-lora", "-o", str(tmp_path / "m"), "--set", "rank")
    assert code == 2
    assert "`--set` needs NAME=VALUE, found `rank`" in err


def test_an_unwritable_log_file_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run("check", "moe-lora", "--log-file", str(tmp_path / "none" / "log"))
    assert code == 2
    assert "error[U002]" in err


def test_doctor_json_is_one_object(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code in (0, 3)
    assert {"torch", "transformers", "peft", "C++ compiler", "Python.h", "GPU"} <= {
        f["name"] for f in report["findings"]
    }
    assert report["host"]["isas"][-1] == "scalar"


def test_doctor_says_how_to_get_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    code, out, _ = run("doctor")
    assert code == 3
    assert "apt install g++" in out


def test_stdout_belongs_to_the_session(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), Session(as_json=True) as session:
        print("python noise")
        subprocess.run(["echo", "child noise"], check=True)
        session.result({"x": 1})
    out, err = capfd.readouterr()
    assert json.loads(out) == {"x": 1}
    assert "python noise" in err
    assert "child noise" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_command_and_remove_what_is_unfinished(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(typer.Exit) as ended, Session(), new_folder(tmp_path / "out") as unfinished:
            (unfinished / "half").write_text("half")
            os.kill(os.getpid(), number)
        assert ended.value.exit_code == 130
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_process_of_torchrun_keeps_its_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit), Session():
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_pipe_is_no_bug() -> None:
    command = f"{sys.executable} -m ktc list --json | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env={**os.environ})
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_bug(closed: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"{sys.executable} -m ktc check moe-lora --log-file {log} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env={**os.environ})
    assert (done.returncode, "Traceback" in done.stderr, "bug" in done.stderr) == (0, False, False)
    assert "rules" in log.read_text()


def test_a_cache_that_cannot_be_written_is_no_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTC_CACHE_DIR", "/proc/nope")
    code, _, err = run("check", "moe-lora", "tiny:deepseek_v2")
    assert code == 3
    assert "error[H229]" in err and "KTC_CACHE_DIR" in err


def test_every_command_has_json(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("explain", "e042", "--json")
    assert (code, json.loads(out)["code"]) == (0, "E042")
    code, out, _ = run("explain", "E999", "--json")
    assert (code, json.loads(out)["diagnostics"][0]["code"]) == (2, "U020")
    (tmp_path / "a.ktr").write_text("lora {rank=8}\n")
    code, out, _ = run("fmt", "--check", "--json", str(tmp_path))
    assert (code, json.loads(out)["changed"]) == (1, [str(tmp_path / "a.ktr")])
    code, out, _ = run("graph", "--json", "no-such-model")
    assert (code, json.loads(out)["diagnostics"][0]["code"]) == (2, "I100")


def test_json_of_a_layer_holds_the_blocks_of_that_layer(run: Run) -> None:
    arguments = ("graph", "tiny:deepseek_v2", "--stage", "matched", "--layer", "0")
    code, out, _ = run(*arguments, "--json")
    dump = json.loads(out)
    assert code == 0
    assert dump["blocks"] and all(0 in block["layers"] for block in dump["blocks"])
    assert dump["matches"]
    assert json.loads(run(*arguments, "--format", "json")[1]) == dump


def test_an_error_of_an_import_that_an_interrupt_ended_is_no_bug_of_ktc(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, Session():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None
    assert ended.value.exit_code == 130
    assert capfd.readouterr().err.strip() == "error[U130]: interrupted"


def test_an_interrupt_of_the_first_imports_has_no_trace() -> None:
    interrupted = "import sys\nsys.modules['ktc.cli.app'] = None\nimport ktc.cli\n"
    interrupted += "class App:\n def run(): raise KeyboardInterrupt\nktc.cli.app = App\n"
    program = f"{interrupted}from ktc.__main__ import run\nrun()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "error[U130]: interrupted\n")


def test_an_interrupt_that_an_import_swallows_still_ends_the_command() -> None:
    session = Session()
    with pytest.raises(typer.Exit) as left, session:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        session.raise_if_interrupted()
    assert left.value.exit_code == 130


@pytest.mark.parametrize(("by_interrupt", "exit_code"), [(True, 130), (False, InputRefused.exit_code)])
def test_an_error_after_an_interrupt_is_reported_unless_the_interrupt_led_to_it(
    by_interrupt: bool, exit_code: int
) -> None:
    session, refused = Session(), InputRefused(Diagnostic("L457", "counts of another model"))
    with pytest.raises(typer.Exit) as left, session:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:  # the end of a server
            if by_interrupt:
                raise refused from None
        raise refused
    assert left.value.exit_code == exit_code
