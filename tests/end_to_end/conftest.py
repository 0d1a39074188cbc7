"""Compiled models, made once for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ktc


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`compiled(model, rules, device)` compiles once and returns OUT; the package has a name of its own."""
    made: dict[tuple[str, str, str], Path] = {}
    folder = tmp_path_factory.mktemp("compiled")

    def compile_once(model: str, rules: str, device: str = "cpu") -> Path:
        if (model, rules, device) not in made:
            name = f"e2e_{model.rpartition(':')[2]}_{rules}_{device}".replace("-", "_")
            made[model, rules, device] = ktc.compile(model, rules, folder / name, settings={"device": device})
        return made[model, rules, device]

    return compile_once
