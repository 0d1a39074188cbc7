"""The small compiled models that tests of stacked steps share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ktc.model import twin
from ktc.stages.link import link
from ktc.training.trainers import several_lengths
from ktc.training.trainers.stacking import Stacker


@pytest.fixture(scope="session")
def package(hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`package(family)`: a small model of it, compiled by hand, whose experts are their PyTorch reference."""

    @functools.cache
    def made(family: str) -> Path:
        source = twin.write(family, tmp_path_factory.mktemp("models"))
        return link(hand_made.package(source), tmp_path_factory.mktemp("build") / family)

    return made


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The shapes of the chunks of each pass, whose layers pad as on a GPU."""
    seen: list[list[tuple[int, int]]] = []
    stock = Stacker._through_layers

    def counted(self: Any, chunks: Any) -> Any:
        seen.append([tuple(chunk.hidden.shape[:2]) for chunk in chunks])
        return stock(self, chunks)

    monkeypatch.setattr(Stacker, "_through_layers", counted)
    monkeypatch.setattr(Stacker, "_launches", lambda *_: True)
    monkeypatch.setattr(several_lengths, "is_launched", lambda _: True)
    monkeypatch.setattr(several_lengths, "_MULTIPLE", 1)
    return seen
