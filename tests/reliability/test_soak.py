"""The program of `make attack` itself, for a moment and with few clients."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from ktc.inference.serving import server
from reliability import soak

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in server.PACKAGES), reason="the extra `serve` is not installed"
)


@pytest.mark.slow
def test_a_server_loses_nothing_in_an_attack(compiled: Path, tmp_path: Path) -> None:
    report = soak.Report(seconds=2.0, clients=8, seed=1)
    with soak.serving(compiled, tmp_path / "log") as running:
        soak.attack(running, report)
    assert report.lost == []
    assert sum(report.outcomes.values()) > 8
    assert "nothing was lost" in soak.told(report)


def test_memory_that_grows_and_wrong_answers_are_told() -> None:
    report = soak.Report(seconds=100.0, clients=1, seed=1, outcomes=dict(Counter(["good, LOST"])))
    report.samples = [soak.Sample(each, 10**8 * (1 + each), 20, 5) for each in range(100)]
    report.after = soak.Sample(100.0, 10**10, 200, 5)
    grown, left = soak._grown(report)
    assert grown.startswith("memory grew from")
    assert left == "5 threads and 200 descriptors are left"
    report.lost = [grown, left]
    assert "LOST:" in soak.told(report)
    assert asdict(report)["outcomes"] == {"good, LOST": 1}
