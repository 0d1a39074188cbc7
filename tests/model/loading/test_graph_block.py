"""The code of a block: it stays readable without its file, and a proof leaves none of its modules behind."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from ktc.model.loading.graph_block import modules_forgotten, read_forward

CODE = "def forward(self, x):\n    return x\n"


def blocks() -> set[str]:
    return {name for name in sys.modules if name.startswith("ktc_block_")}


def test_modules_of_a_proof_are_forgotten_and_their_code_runs_on(tmp_path: Path) -> None:
    before, file = blocks(), tmp_path / "block.py"
    file.write_text(CODE)
    with modules_forgotten():
        forward = read_forward(file)
        assert len(blocks() - before) == 1
    assert blocks() == before
    assert forward(None, 3) == 3


def test_code_stays_readable_where_its_file_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "block.py"
    file.write_text(CODE)
    with modules_forgotten():
        forward = read_forward(file)
        file.unlink()
        assert inspect.getsource(forward) == CODE
