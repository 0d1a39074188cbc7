"""Any command removes what killed processes left in the folders that its arguments name."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from forks import in_a_child, kill_this

from ktc.cli import app as cli
from ktc.foundation import files

RULES = "rule a {\n}\n"


def left_in(place: Path) -> None:
    """Leave what a killed writer of a file there leaves."""

    def killed() -> None:
        with files.folder_beside(place / "a"):
            kill_this()

    place.mkdir(parents=True, exist_ok=True)
    assert in_a_child(killed) == -signal.SIGKILL
    assert len(files.leftovers(place)) == 1


@pytest.mark.parametrize("command", ["fmt PLACE/a.ktr", "check PLACE/a.ktr", "verify PLACE", "graph PLACE -o PLACE/b"])
def test_a_command_sweeps_where_it_reads(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.ktr").write_text(RULES)
    left_in(tmp_path)
    cli.main(command.replace("PLACE", str(tmp_path)).split())
    assert files.leftovers(tmp_path) == []


def test_a_compiled_model_is_swept_beside_inside_and_in_its_packed_store(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for place in (tmp_path, out, out / "packed"):
        left_in(place)
    assert cli.main(["verify", str(out)]) == 2
    assert [files.leftovers(place) for place in (tmp_path, out, out / "packed")] == [[], [], []]


def test_what_is_no_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "\0" + "a" * 5000]) == 2
