"""`ktc census` hands over to the source's `benchmarks/census`, and says so where only the wheel is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from ktc.cli import app as cli
from ktc.cli import census


def test_an_installed_package_says_where_the_census_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(census, "BENCHMARKS", tmp_path / "benchmarks")
    assert cli.main(["census", "--family", "qwen3_moe"]) == 2
    said = capfd.readouterr().err
    assert "U014" in said and "comes with the source" in said


@pytest.mark.slow
def test_the_package_runs_by_its_name(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}"}
    command = [sys.executable, "-m", "census", "--family", "qwen3", "-o", "page", "--format", "markdown", "-q"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| qwen3 | none | attention only | equal |" in (tmp_path / "page").read_text(encoding="utf-8")
