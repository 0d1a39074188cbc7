"""Tab completion: what a user can name, by its first letters, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktc.cli import completion


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, file in (
        ("build/my_model", "ktc.json"),
        ("builds", "notes"),
        ("base", "config.json"),
        (".b", "ktc.json"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).touch()
    (tmp_path / "mine.ktr").touch()
    (tmp_path / "machine.toml").touch()
    return tmp_path


def test_words_begin_as_the_user_typed() -> None:
    assert completion.compiled_models("b") == ["base", "build/", "builds/"]
    assert completion.compiled_models("build/") == ["build/my_model"]
    assert completion.compiled_models("missing/") == []
    assert completion.models("tiny:qwen3_m") == ["tiny:qwen3_moe"]
    assert completion.models("ba") == ["base"]
    assert completion.programs("moe-q") == ["moe-qat"]
    assert completion.programs("mi") == ["mine.ktr"]
    assert completion.machines("h") == ["h100"]
    assert completion.machines("mach") == ["machine.toml"]


def test_a_shell_gets_the_words_of_an_argument(folder: Path) -> None:
    typed = {"_KTC_COMPLETE": "complete_bash", "COMP_WORDS": "ktc generate build/", "COMP_CWORD": "2"}
    done = subprocess.run(
        [Path(sys.executable).parent / "ktc"], env={**os.environ, **typed}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["build/my_model"]
