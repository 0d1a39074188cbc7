"""`--force` of export, merge and quantize replaces what these wrote, as a whole, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter

from ktc.adapters.conversion import RECORD, write_record
from ktc.adapters.folder import CONFIG, WEIGHTS
from ktc.adapters.save import EXPORT, WRITTEN_BY, require_new, save_adapter
from ktc.diagnostics import InputRefused
from ktc.foundation import files
from ktc.foundation.files import new_folder


def folder(place: Path, *names: str) -> Path:
    place.mkdir()
    for name in names:
        (place / name).write_text("{}")
    return place


def exported(place: Path, *more: str) -> Path:
    save_adapter(folder(place, *more), {}, {"a": torch.zeros(1)})
    return place


def merged(place: Path) -> Path:
    folder(place, "config.json", "model.safetensors")
    write_record(place, "merge", place, None, {}, ["model.safetensors"])
    return place


def gguf(place: Path, *keys: str) -> Path:
    writer = GGUFWriter(place, "llama")
    for key in keys:
        writer.add_string(key, EXPORT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


def test_what_ktc_wrote_is_replaced_when_asked(tmp_path: Path) -> None:
    written = [
        exported(tmp_path / "adapter"),
        exported(tmp_path / "beside", "adapter_ktc.json"),
        merged(tmp_path / "merged"),
        gguf(tmp_path / "adapter.gguf", WRITTEN_BY),
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
        folder(tmp_path / "of peft", CONFIG, WEIGHTS),
        exported(tmp_path / "with notes", "notes.txt"),
        gguf(tmp_path / "downloaded.gguf"),
        folder(tmp_path / "no record", RECORD, "config.json"),
        merged(tmp_path / "with a folder"),
    ]
    folder(tmp_path / "with a folder" / "mine")
    (tmp_path / "link").symlink_to(merged(tmp_path / "merged"))
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
