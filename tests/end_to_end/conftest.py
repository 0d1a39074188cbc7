"""Compiled models, made once for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ktc


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`compiled(model, rules)` compiles once and returns OUT; the package has a name of its own."""
    made: dict[tuple[str, str], Path] = {}
    folder = tmp_path_factory.mktemp("compiled")

    def compile_once(model: str, rules: str) -> Path:
        if (model, rules) not in made:
            name = f"e2e_{model.rpartition(':')[2]}_{rules}".replace("-", "_")
            made[model, rules] = ktc.compile(model, rules, folder / name)
        return made[model, rules]

    return compile_once
