"""A library of kernels is loaded where its functions are those that ktc calls."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Any

import pytest

from ktc.diagnostics import InputRefused
from ktc.foundation.files import file_digest
from ktc.model.kernels.kernel_library import KernelLibrary


def test_a_library_whose_functions_have_other_arguments_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Older(importlib.machinery.SourceFileLoader):
        """Loads the module of a library from before libraries said which functions they have."""

    monkeypatch.setattr(importlib.machinery, "ExtensionFileLoader", Older)
    path = tmp_path / "old.so"
    path.write_text("")
    kernel: Any = KernelLibrary(path, file_digest(path), (("experts", "bf16"),)).kernel("experts")
    with pytest.raises(InputRefused, match="L412") as refused:
        kernel.engine(1)
    (found,) = refused.value.diagnostics
    assert "old.so" in found.message and found.hint == "compile the model again"
