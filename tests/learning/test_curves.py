"""`make learn-curves`: its table and picture, and, shortened, every way to train on this machine."""

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


def test_the_table_has_the_spread_over_seeds_and_the_distance_from_stock(tmp_path: Path) -> None:
    from learning import curves_page
    from learning.curves import Curve

    curves = [
        Curve(label, seed, (1.0, 0.5 + away + seed / 10), {1: 0.9, 2: 0.7 + away + seed / 10})
        for label, away in (("stock", 0.0), ("ours", 0.002))
        for seed in range(3)
    ]
    (tmp_path / "learning.md").write_text(f"before\n{curves_page.MARKS[0]}old\n{curves_page.MARKS[1]}after\n")
    curves_page.renew(curves, tmp_path, "2026-01-01", "torch 0")
    page, picture = (tmp_path / "learning.md").read_text(), (tmp_path / curves_page.PICTURE).read_bytes()
    assert "old" not in page
    assert page.endswith("after\n")
    assert "| stock | 0.8000 ± 0.0500 | 0.8000 ± 0.1000 | 0.0000 |" in page
    assert "| ours | 0.8010 ± 0.0500 | 0.8020 ± 0.1000 | 0.0020 |" in page
    curves_page.renew(curves, tmp_path, "2026-01-01", "torch 0")
    assert (tmp_path / curves_page.PICTURE).read_bytes() == picture


@pytest.mark.slow
def test_ktc_follows_stock_peft(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "learning.curves", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stock, *ours = json.loads((tmp_path / "curves.json").read_text())
    assert {curve["label"] for curve in ours} >= {"ktc, bf16 experts", "ktc, INT4 experts"}
    bf16 = next(curve for curve in ours if curve["label"] == "ktc, bf16 experts")
    assert bf16["losses"] == pytest.approx(stock["losses"], rel=5e-3)
