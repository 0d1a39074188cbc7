"""Where the data folders of ktc lie: the grammar, the templates, the C++ headers and the bundled rules.

A wheel carries them in `ktc/_data`; a checkout (also an editable install) has them beside the package.
This is the only module that knows; everything else asks one of these functions.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def grammar() -> Path:
    """The folder with `ktr.lark`."""
    return _folder("grammar")


def templates() -> Path:
    """The folder with the Jinja templates (`*.cpp.j2`, `package/*.j2`)."""
    return _folder("templates")


def runtime_include() -> Path:
    """The folder to put on a C++ compiler's include path: it holds `ktc/*.hpp`."""
    return _folder("runtime") / "include"


def runtime_bindings() -> Path:
    """The folder to put on the include path of a Python module: it holds `ktc_python/*.hpp` and `module.cpp`."""
    return _folder("runtime") / "python"


def runtime_sources() -> Path:
    """The folder with C++ sources that are compiled as they are."""
    return _folder("runtime") / "src"


def rules() -> Path:
    """The folder with the bundled rule programs and, under `std`, the patterns they import."""
    return _folder("rules")


def _folder(name: str) -> Path:
    bundled = _PACKAGE / "_data"
    root = bundled if bundled.is_dir() else _PACKAGE.parent
    return root / name
