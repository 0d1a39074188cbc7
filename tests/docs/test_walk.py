"""The walk of docs/walk.md, as a newcomer takes it: from a fresh clone, in order, with the promised words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

PICTURES = ROOT / "docs" / "pictures"


def _module(name: str) -> Any:
    spec = util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


walk = _module("walk")


def test_the_walk_has_twenty_commands_and_eight_lines() -> None:
    assert len(walk.STEPS) == 20
    statements = [line for line in walk.LINES.splitlines() if line]
    assert len(statements) == 8


def test_the_page_has_the_commands_and_lines_of_the_script_and_a_time_for_each() -> None:
    page = walk.PAGE.read_text(encoding="utf-8")
    assert "\n".join(step.command for step in walk.STEPS) in page
    assert walk.LINES in page
    assert len(re.findall(r"^\| \d+ \| .* \| \d+\.\d \| `.*` \|$", page, re.MULTILINE)) == len(walk.STEPS) + 1


def test_the_pictures_of_the_page_exist_and_are_small() -> None:
    named = re.findall(r"pictures/(\w+\.png)", walk.PAGE.read_text(encoding="utf-8"))
    assert sorted(named) == sorted(path.name for path in PICTURES.iterdir())
    assert all(path.stat().st_size <= 150_000 for path in PICTURES.iterdir())


@pytest.mark.slow
def test_the_walk_ends_with_right_answers_from_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    taken = subprocess.run(
        [sys.executable, str(clone / "docs" / "walk.py")], env={**os.environ, "PYTHONPATH": str(clone)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert taken.returncode == 0, taken.stdout + taken.stderr
    left = subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True, check=True)
    assert left.stdout == "", "the walk changes no file of the repository"
