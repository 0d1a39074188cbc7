"""A command that succeeds ends with a line that has the command that usually follows."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import typer

from ktc.cli import app as cli

LINES = {
    "check moe-lora": "next: ktc check moe-lora MODEL",
    "fmt PLACE/a.ktr": "next: ktc check PLACE/a.ktr",
    "fmt PLACE": "next: ktc check FILE.ktr",
    "graph tiny:qwen3_moe --stage captured -o PLACE/graph.txt": "next: ktc compile tiny:qwen3_moe moe-lora -o OUT",
}


@pytest.mark.parametrize("command", LINES)
def test_the_last_line_is_the_next_command(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ktr").write_text("# Nothing but a comment is a program too.\n")
    code = cli.main(command.replace("PLACE", str(tmp_path)).split())
    said = capfd.readouterr().err
    assert (code, said.splitlines()[-1]) == (0, LINES[command].replace("PLACE", str(tmp_path)))


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
