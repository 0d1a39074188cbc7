"""`make learn-int4`: its table and picture, and, shortened, every way to train and serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


@pytest.fixture(autouse=True)
def _learning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_the_page_gets_the_table_and_the_same_picture_for_the_same_rows(tmp_path: Path) -> None:
    from learning import modes_page
    from learning.modes import ARMS, Row

    rows = [Row(arm.label, arm.trained, arm.served, 0.5, 90.0, 40.0, 0.0, 1e-3) for arm in ARMS]
    (tmp_path / "quantisation.md").write_text(f"before\n{modes_page.MARKS[0]}old\n{modes_page.MARKS[1]}after\n")
    modes_page.renew(rows, tmp_path, "2026-01-01", 0)
    page, picture = (tmp_path / "quantisation.md").read_text(), (tmp_path / modes_page.PICTURE).read_bytes()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert all(f"| {arm.label} | 0.500 | 90.0 % | 40.0 % | 0 | 1.0e-03 |" in page for arm in ARMS)
    modes_page.renew(rows, tmp_path, "2026-01-01", 0)
    assert (tmp_path / modes_page.PICTURE).read_bytes() == picture


@pytest.mark.slow
def test_every_way_to_train_and_serve_runs_and_matched_ones_agree(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "learning.modes", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["label"]: row for row in json.loads((tmp_path / "modes.json").read_text())}
    assert all(row["calls"] == 0 for label, row in rows.items() if "served as trained" in label)
    assert all(row["calls"] > 0 for label, row in rows.items() if "served as trained" not in label)
    assert "| bf16, served as trained |" in (tmp_path / "modes.md").read_text()
