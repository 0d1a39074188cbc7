"""The Python files of a compiled folder as modules, without the cache of compiled code, which nothing seals."""

from __future__ import annotations

import importlib.abc
import importlib.util
from pathlib import Path
from types import CodeType, ModuleType

from ktc.foundation.regular_files import read_regular


class _Text(importlib.abc.InspectLoader):
    """A module from its text, which tracebacks and `torch.compile` can read after the file is gone."""

    def __init__(self, path: Path) -> None:
        self._path, self._text = path, read_regular(path).decode()

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text, str(self._path))


def module_of(path: Path, name: str) -> ModuleType:
    """Run the file as a module `name` outside `sys.modules`. Raises OSError, and what its code raises."""
    spec = importlib.util.spec_from_loader(name, _Text(path))
    assert spec is not None and spec.loader is not None, "a loader gives a spec"
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    spec.loader.exec_module(module)
    return module
