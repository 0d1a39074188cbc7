"""The table of rewrite targets: complete, light to import, and each row what a reader of its file expects."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import pytest

from ktc.model import targets
from ktc.model.targets import MODULES, ROWS, TARGETS, CpuMoe, ModuleTarget, Place, Target

HEAVY = (
    "torch",
    "transformers",
    "peft",
    "ktc.model.graph",
    "ktc.model.experts",
    "ktc.model.linears",
    "ktc.foundation.host",
)


def test_the_rule_language_loads_no_torch() -> None:
    code = "import sys; from ktc.language import dsl; dsl.load('moe-lora'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ktc.model.targets.cpu_moe" in loaded
    assert not [name for name in loaded if name.startswith(HEAVY)]


def test_every_file_of_a_target_is_a_row() -> None:
    found: set[type[Target]] = set()
    for module in pkgutil.iter_modules(targets.__path__):
        members = vars(importlib.import_module(f"ktc.model.targets.{module.name}")).values()
        found |= {
            each for each in members if isinstance(each, type) and issubclass(each, Target) and "name" in vars(each)
        }
    assert found == set(ROWS)
    assert all(target.__module__ == f"ktc.model.targets.{name}" for name, target in TARGETS.items())
    assert len(TARGETS) == len(ROWS)
    assert set(MODULES) == {target.module for target in ROWS if issubclass(target, ModuleTarget)}
    assert MODULES["fused_moe"] is CpuMoe  # `gpu_moe` puts the same module


def test_place_moves_what_all_other_passes_have_left() -> None:
    passes = [target for target in ROWS if target.changes_graphs]
    assert passes[-1] is Place
    assert all(target.apply.__func__ is not Target.apply.__func__ for target in passes)


@pytest.mark.parametrize("target", ROWS, ids=lambda target: target.name)
def test_a_target_is_its_settings(target: type[Target]) -> None:
    hints = get_type_hints(target)
    assert target.__doc__
    assert set(target.fuses) <= TARGETS.keys()
    assert set(target.required_devices) <= set(target.consumes)
    assert {setting.name for setting in fields(target)} <= hints.keys()
