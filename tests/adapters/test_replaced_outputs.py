"""`--force` of export, merge and quantize replaces what these wrote, as a whole, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc.adapters.conversion import RECORD
from ktc.adapters.folder import CONFIG, WEIGHTS
from ktc.adapters.save import require_new
from ktc.diagnostics import InputRefused
from ktc.foundation import files
from ktc.foundation.files import new_folder


def folder(place: Path, *names: str) -> Path:
    place.mkdir()
    for name in names:
        (place / name).write_text("{}")
    return place


def test_what_ktc_wrote_is_replaced_when_asked(tmp_path: Path) -> None:
    written = [
        folder(tmp_path / "adapter", CONFIG, WEIGHTS),
        folder(tmp_path / "beside", CONFIG, WEIGHTS, "adapter_ktc.json"),
        folder(tmp_path / "merged", RECORD, "config.json"),
        folder(tmp_path / "files", "adapter.gguf") / "adapter.gguf",
    ]
    for place in written:
        require_new(place, force=True)
        with pytest.raises(InputRefused) as refused:
            require_new(place)
        assert "`--force` replaces it" in refused.value.diagnostics[0].hint
    require_new(tmp_path / "new")


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    kept = [
        folder(tmp_path / "run", CONFIG, WEIGHTS, "train.yaml"),
        folder(tmp_path / "home", "thesis.tex"),
        folder(tmp_path / "empty"),
        folder(tmp_path / "files", "notes.txt") / "notes.txt",
    ]
    (tmp_path / "link").symlink_to(folder(tmp_path / "merged", RECORD))
    for place in (*kept, tmp_path / "link"):
        with pytest.raises(InputRefused) as refused:
            require_new(place, force=True)
        assert "`--force` replaces only" in refused.value.diagnostics[0].message
    for read in (tmp_path / "merged", tmp_path / "merged" / "below"):
        with pytest.raises(InputRefused, match="is read to make the new one"):
            require_new(tmp_path / "merged", True, (read, None))


@pytest.mark.parametrize("swaps", [True, False])
def test_a_folder_is_replaced_as_a_whole(swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not swaps:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    place = folder(tmp_path / "merged", "old")
    with pytest.raises(ZeroDivisionError), new_folder(place, replaces=True) as draft:
        (draft / "new").write_text("")
        raise ZeroDivisionError
    assert [file.name for file in place.iterdir()] == ["old"]
    with new_folder(place, replaces=True) as draft:
        (draft / "new").write_text("")
    assert [file.name for file in place.iterdir()] == ["new"]
    assert [file.name for file in tmp_path.iterdir()] == ["merged"]
