"""A file or a folder is there whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from forks import in_a_child, kill_this

from ktc.diagnostics import HostLacks
from ktc.foundation import files


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
    with pytest.raises(HostLacks, match="U003"), files.refusing(path):
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


# Leftovers of processes that were killed


def killed_while_writing(path: Path, kind: str) -> None:
    with files.new_folder(path) if kind == "folder" else files.replaced_file(path) as beside:
        (beside / "half" if kind == "folder" else beside).write_text("half")
        kill_this()


def test_an_interrupt_when_a_folder_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = os.mkdir

    def interrupted(path: Path, *more: int) -> None:
        made(path, *more)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), files.folder_beside(tmp_path / "a"):
        pytest.fail("it was not made")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_writer_in_a_place_removes_what_a_killed_one_left(tmp_path: Path, kind: str) -> None:
    assert in_a_child(lambda: killed_while_writing(tmp_path / "a", kind)) == -signal.SIGKILL
    (left,) = files.leftovers(tmp_path)
    assert left.name.startswith(".a-")
    files.write_file(tmp_path / "other", "whole")
    assert names(tmp_path) == ["other"]


def test_a_living_writer_keeps_its_folder(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "a") as beside:
        (beside / "content").write_text("first")
        assert files.leftovers(tmp_path) == []
        assert in_a_child(lambda: files.sweep(tmp_path)) == 0
        assert not files.remove_leftover(beside)
    assert (tmp_path / "a" / "content").read_text() == "first"


def test_only_names_that_ktc_makes_are_removed(tmp_path: Path) -> None:
    kept = [".a.writing", ".a-abc.writing", "a-abcdefgh.writing", ".a-abcdefgh.writing2", ".a-ABCDEFGH.writing"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".file-abcdefgh.writing").write_text("a file")
    (tmp_path / ".link-abcdefgh.writing").symlink_to(tmp_path / ".a.writing")
    files.sweep(tmp_path)
    assert len(names(tmp_path)) == len(kept) + 2


def test_temporary_folders_go_with_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def killed() -> None:
        with files.temporary_folder("check"):
            kill_this()

    assert in_a_child(killed) == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    with files.temporary_folder("check") as folder:
        assert names(tmp_path) == [folder.parent.name]
    assert names(tmp_path) == []


def test_a_long_name_leaves_room_for_the_mark(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    files.write_file(path, "whole")
    assert names(tmp_path) == [path.name]
