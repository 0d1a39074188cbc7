"""The peers of benchmarks: modules of `benchmarks/peers` in a source checkout, which a wheel does not have.

In: a module's name. Out: the module. Refused: an installation without them (U014).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import resources

_PACKAGE: Final = "ktc_peers"


def peer(name: str) -> Any:
    """Import a module of the peers. Raise InputRefused (U014)."""
    if _PACKAGE not in sys.modules:
        folder = resources.peers()
        if not folder.is_dir():
            message = "the peers of benchmarks come with the source of ktc and not with the installed package"
            hint = "clone the repository, and `pip install -e .` in it; or leave the peers out"
            raise InputRefused(Diagnostic("U014", message, hint=hint))
        file, places = folder / "__init__.py", [str(folder)]
        spec = importlib.util.spec_from_file_location(_PACKAGE, file, submodule_search_locations=places)
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.{name}")
