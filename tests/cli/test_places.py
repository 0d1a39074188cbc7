"""A command removes what killed processes left where it writes, and nothing where it reads."""

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


@pytest.mark.parametrize(
    "command",
    ["fmt PLACE/a.ktr", "graph PLACE -o PLACE/b", "compile PLACE/none PLACE/a.ktr -o PLACE/b", "pack PLACE/b"],
)
def test_a_command_removes_stale_temporaries_where_it_writes(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.ktr").write_text(RULES)
    left_in(tmp_path)
    cli.main(command.replace("PLACE", str(tmp_path)).split())
    assert files.leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "command",
    [
        "check PLACE/a.ktr", "check PLACE/a.ktr PLACE/out", "graph PLACE/out", "explain PLACE/out", "verify PLACE/out",
        "generate PLACE/out -p Hello", "compile PLACE/out PLACE/a.ktr -o ELSE/b", "pack PLACE/out --for train",
    ],
)  # fmt: skip
def test_what_a_command_reads_stays_as_it_is(command: str, tmp_path: Path) -> None:
    """Another user's process may read there too, and a shared folder may not be the reader's to clean."""
    place = tmp_path / "place"
    places = (place, place / "out", place / "out" / "packed")
    for each in places:
        left_in(each)
    (place / "a.ktr").write_text(RULES)
    if command.startswith("pack"):
        (place / "out" / "config.json").write_text("{}")
    cli.main(command.replace("PLACE", str(place)).replace("ELSE", str(tmp_path)).split())
    assert [len(files.leftovers(each)) for each in places] == [1, 1, 1]


def test_a_compiled_model_is_cleaned_beside_inside_and_in_its_packed_store(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for place in (tmp_path, out, out / "packed"):
        left_in(place)
    assert cli.main(["pack", str(out)]) == 2
    assert [files.leftovers(place) for place in (tmp_path, out, out / "packed")] == [[], [], []]


def test_what_is_no_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "\0" + "a" * 5000]) == 2
