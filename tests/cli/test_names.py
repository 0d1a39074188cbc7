"""Names of files that a command is given: those that no file can have, and those that are not UTF-8."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ktc.cli import app as cli

NOT_UTF8 = os.fsdecode(b"mod\xff")


@pytest.mark.parametrize("command", ["verify", "export", "pack", "prove", "serve"])
@pytest.mark.parametrize("name", ["a" * 5000, "loop"])
def test_a_name_that_no_file_can_have_is_refused(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert cli.main([command, name, "--json"]) == 2
    (found,) = json.loads(capfd.readouterr().out)["diagnostics"]
    assert found["code"] != "U099"
    assert name[:100] in found["message"]


def test_a_name_that_is_not_utf8_is_shown_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(NOT_UTF8).mkdir()
    (Path(NOT_UTF8) / "ktc.json").write_text("{}")
    assert cli.main(["verify", NOT_UTF8, "--log-file", "log"]) == 2
    assert "mod?" in capfd.readouterr().err
    rules = Path(f"{NOT_UTF8}.ktr")
    rules.write_text("rule a {}\n")
    assert cli.main(["fmt", str(rules)]) in (0, 2)
    assert "U099" not in capfd.readouterr().err
