"""A file or a folder is there whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ktc import files
from ktc.diagnostics import InputRefused


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_replaces_another_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    files.write_file(path, "first")
    path.chmod(0o640)
    files.write_file(path, b"second")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("second", 0o640)
    assert names(path.parent) == ["a.txt"]


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    files.write_file(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_file(pipe, "text")
    assert os.read(reader, 10) == b"text"
    assert pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize("broken", ["fsync", "rename"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_error_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, broken: str
) -> None:
    path = tmp_path / "a"
    if kind == "file":
        path.write_text("old")

    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, failing)
    with pytest.raises(InputRefused, match="U003"), files.refusing(path):
        if kind == "file":
            files.write_file(path, "new")
        else:
            with files.new_folder(path) as beside:
                (beside / "content").write_text("new")
    assert [each.read_text() for each in tmp_path.iterdir()] == (["old"] if kind == "file" else [])


def test_a_folder_appears_whole_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    with files.new_folder(path) as beside:
        (beside / "content").write_text("first")
        assert not path.exists()
    with pytest.raises(OSError, match="not empty"), files.new_folder(path) as beside:
        (beside / "content").write_text("second")
    assert (path / "content").read_text() == "first"
    assert names(path.parent) == ["a"]
