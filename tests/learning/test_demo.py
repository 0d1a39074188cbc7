"""`make learn`, shortened: every stage runs, tuning learns, and the page and its picture are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


@pytest.mark.slow
def test_the_shortened_demo_learns_the_style(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "learning", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(f"$ ktc {command}" in done.stdout for command in ("compile", "train", "eval"))
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    (run,) = found["runs"]
    assert run["losses"][-1] < run["losses"][0] / 2
    assert run["tuned"]["bleu-4"] > run["base"]["bleu-4"] + 10
    assert "| none: the base |" in (tmp_path / "learning.md").read_text(encoding="utf-8")
    assert (tmp_path / "learning.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
