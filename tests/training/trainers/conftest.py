"""The small compiled models that tests of stacked steps share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ktc.model import twin
from ktc.stages.link import link


@pytest.fixture(scope="session")
def package(hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`package(family)`: a small model of it, compiled by hand, whose experts are their PyTorch reference."""

    @functools.cache
    def made(family: str) -> Path:
        source = twin.write(family, tmp_path_factory.mktemp("models"))
        return link(hand_made.package(source), tmp_path_factory.mktemp("build") / family)

    return made
