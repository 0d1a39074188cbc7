"""Folders of the checkout that tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1]
ROOT: Final = TESTS.parent
GOLDEN: Final = TESTS / "golden"
CONFIGS: Final = TESTS / "configs"
RULES: Final = TESTS / "rules"
REMOTE_CODE: Final = TESTS / "remote_code"
DOCS: Final = ROOT / "docs"
OBJECTS: Final = ROOT / "build" / "test-cache" / "objects"
