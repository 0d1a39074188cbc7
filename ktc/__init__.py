"""ktc, a compiler for mixture-of-experts language models: the public Python interface.

Importing it has no side effects: it does not import torch, create a folder or run a compiler. Each name is imported
from its module at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktc.compiler import Report as Report
    from ktc.compiler import check as check
    from ktc.compiler import compile as compile
    from ktc.compiler import inspect as inspect
    from ktc.foundation.versions import __version__ as __version__
    from ktc.model.loading.load import load as load
    from ktc.model.packing.pack import pack as pack
    from ktc.model.packing.verify import verify as verify
    from ktc.training.tune.train import train as train

_HOME = {
    "__version__": "ktc.foundation.versions",
    "Report": "ktc.compiler",
    "check": "ktc.compiler",
    "compile": "ktc.compiler",
    "inspect": "ktc.compiler",
    "load": "ktc.model.loading.load",
    "pack": "ktc.model.packing.pack",
    "train": "ktc.training.tune.train",
    "verify": "ktc.model.packing.verify",
}
__all__ = ["Report", "__version__", "check", "compile", "inspect", "load", "pack", "train", "verify"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `ktc` has no attribute `{name}`")
    if _HOME[name] == "ktc.compiler":
        _check_versions()
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _check_versions() -> None:
    """Check versions before the compiler is imported, since an unsupported torch or transformers may fail to import."""
    import warnings

    from ktc.foundation import versions

    for newer in versions.require():
        warnings.warn(f"{newer.message} ({newer.hint})", stacklevel=3)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
