"""Options and fixtures of the whole test suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite the golden files with what the code gives now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with `tests/golden/<name>`; under `--bless` it rewrites that file."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--bless"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file `{name}`: run `pytest --bless` and read the difference"
        assert text == path.read_text(encoding="utf-8")

    return check
