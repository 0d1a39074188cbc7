"""ktc, a compiler for mixture-of-experts language models: the whole public Python interface.

Importing it does nothing else: no torch, no folder made, no compiler probed. Each name is fetched from its module
at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktc.compiler import Report as Report
    from ktc.compiler import check as check
    from ktc.compiler import compile as compile
    from ktc.compiler import inspect as inspect
    from ktc.runtime.load import load as load

__version__ = "0.1.0"

_HOME = {
    "Report": "ktc.compiler",
    "check": "ktc.compiler",
    "compile": "ktc.compiler",
    "inspect": "ktc.compiler",
    "load": "ktc.runtime.load",
}
__all__ = ["Report", "__version__", "check", "compile", "inspect", "load"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `ktc` has no attribute `{name}`")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
