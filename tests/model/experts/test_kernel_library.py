"""A library of kernels is loaded where its functions are those that ktc calls."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Any

import pytest

from ktc.diagnostics import InputRefused
from ktc.foundation import resources
from ktc.foundation.files import file_digest
from ktc.model.kernels import kernel_library
from ktc.model.kernels.kernel_library import KernelLibrary


@pytest.mark.parametrize("module", ["", "interface = 3", "interface = '0123456789abcdef'"])
def test_a_library_whose_functions_have_other_arguments_is_refused(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.machinery, "ExtensionFileLoader", importlib.machinery.SourceFileLoader)
    path = tmp_path / "old.so"
    path.write_text(module)
    for renewal, hint in (("", ""), ("ktc compile M R -o OUT --force", ": `ktc compile M R -o OUT --force`")):
        library = KernelLibrary(path, file_digest(path), (("experts", "bf16"),), renewal=renewal)
        kernel: Any = library.kernel("experts")
        with pytest.raises(InputRefused, match="L412") as refused:
            kernel.engine(1)
        (found,) = refused.value.diagnostics
        assert path.name in found.message and found.hint == f"compile the model again{hint}"


def test_the_interface_is_the_text_that_a_compiler_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def digest_of(structs: str) -> str:
        (tmp_path / "include/ktc/interface").mkdir(parents=True, exist_ok=True)
        (tmp_path / "include/ktc/interface/linear.hpp").write_text(structs)
        return kernel_library.interface_digest.__wrapped__()

    monkeypatch.setattr(resources, "runtime_include", lambda: tmp_path / "include")
    digest = digest_of("struct Arguments { int rows; };")
    assert digest_of("struct Arguments {\n  int rows;  // of x\n};\n") == digest
    assert digest_of("struct Arguments { long rows; };") != digest
