"""The compiled model whose captured steps are tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ktc


@pytest.fixture(scope="module")
def compiled_model(compiled_twin: Callable[..., Path]) -> Any:
    return ktc.load(compiled_twin("tiny:deepseek_v2", "moe-lora"))
