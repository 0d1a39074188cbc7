"""The data folders are found, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc.foundation import resources


def test_every_data_folder_exists() -> None:
    runtime = (resources.runtime_include(), resources.runtime_bindings(), resources.runtime_sources())
    folders = (resources.grammar(), resources.templates(), *runtime, resources.rules())
    assert [folder for folder in folders if not folder.is_dir()] == []


def test_include_folder_is_what_a_compiler_needs() -> None:
    assert (resources.runtime_include() / "ktc").is_dir()


def test_bundled_data_wins_over_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ktc"
    (package / "_data" / "rules").mkdir(parents=True)
    (tmp_path / "rules").mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", package)
    assert resources.rules() == package / "_data" / "rules"
    assert resources.runtime_include() == package / "_data" / "runtime" / "include"
