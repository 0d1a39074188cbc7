"""`ktc compile --prove full`: a compiled model whose real weights are wrong ends with 1 and stays where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ktc.cli import app as cli
from ktc.inference.prove.report import read_report
from ktc.model.packed_store import weight_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
RULES = ("tiny:deepseek_v2", "moe-lora", "--set", "device=cpu")


def test_wrong_experts_end_with_one_and_leave_out_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, by_part = tmp_path / "proven_twin", weight_store.by_part
    other = {"gate": "up", "up": "gate"}

    def swapped(*row: Any) -> Iterator[tuple[Any, Tensor]]:
        yield from ((other.get(part, part), tensor) for part, tensor in by_part(*row))

    monkeypatch.setattr(weight_store, "by_part", swapped)  # of real weights alone: the proof before does not see it
    assert cli.main(["compile", *RULES, "-o", str(out), "--pack", "--prove", "full"]) == 1
    shown = " ".join(capfd.readouterr().out.split())
    assert "RED layer 1, mlp.experts" in shown
    assert "experts 0, 1, 2, 3, 4, 5, 6, 7 and 8 more of 16" in shown
    assert "stays in place" in shown
    report = read_report(out)
    assert report is not None
    assert report.packed == "read from the packed store"

    monkeypatch.undo()
    assert cli.main(["graph", str(out), "--format", "text"]) == 0
    assert "RED layer 1: error" in capfd.readouterr().out
    assert cli.main(["pack", str(out), "--force"]) == 0
    assert cli.main(["prove", str(out), "--tokens", "64"]) == 0
    assert cli.main(["graph", str(out), "--format", "text"]) == 0
    assert "no error above twice stock's own" in capfd.readouterr().out
