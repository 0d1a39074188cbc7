"""`ktc train` starts a process for each GPU where that was planned or asked for, and ends them together."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ktc.cli import processes
from ktc.foundation import environment
from ktc.training.tune.settings import TrainSettings


class Told:
    """A session whose remarks are kept."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def tell(self, text: str) -> None:
        self.remarks.append(text)


@pytest.mark.parametrize(
    ("planned", "gpus", "settings", "expected", "why"),
    [
        (1, 2, {}, 1, ""),
        (2, 2, {}, 2, ""),
        (2, 4, {}, 2, ""),
        (2, 2, {"processes": 1}, 1, ""),
        (1, 0, {"processes": 4}, 4, ""),
        (2, 1, {}, 1, "one process instead of the 2 that were planned: this machine shows 1 GPUs"),
        (2, 2, {"accumulation": 3}, 1, "one process instead of the 2 that were planned: they cannot share 3"),
    ],
)
def test_as_many_processes_as_asked_or_planned(
    planned: int, gpus: int, settings: dict[str, Any], expected: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktc.model.manifest.manifest.read_manifest", lambda folder: SimpleNamespace(processes=planned))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    session: Any = Told()
    assert processes.count_of(session, Path("out"), TrainSettings(**settings)) == expected
    assert why in "".join(session.remarks)
    assert bool(session.remarks) == bool(why)


def test_a_process_of_several_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.count_of(Told(), Path("out"), TrainSettings(processes=2)) == 1  # type: ignore[arg-type]


def test_each_process_has_a_place_of_its_own() -> None:
    first, second = environment.of_processes(Path("out"), 2, 8)
    assert [one["RANK"] for one in (first, second)] == [one["LOCAL_RANK"] for one in (first, second)] == ["0", "1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert Path(first["KTC_STARTED_FOR"]).is_absolute()


def test_one_that_fails_ends_the_others_and_its_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_OTHERS", 0.2)
    began = time.monotonic()
    started = [
        subprocess.Popen([sys.executable, "-c", code])
        for code in ("import time; time.sleep(60)", "raise SystemExit(3)")
    ]
    assert processes._ended(started) == 3
    assert time.monotonic() - began < 30
    assert started[0].returncode == -15
