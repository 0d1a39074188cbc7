"""The data folders of ktc: the grammar, the templates, the C++ headers and the bundled rules.

A wheel has them in `ktc/_data`; a checkout (also an editable install) has them next to the package. No other module
depends on their location.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_COMPILING = (".py", ".hpp", ".cpp", ".j2", ".lark")  # suffixes of files that compile a model


def grammar() -> Path:
    """Return the folder with `ktr.lark`."""
    return _folder("grammar")


def templates() -> Path:
    """Return the folder with the Jinja templates (`*.cpp.j2`, `package/*.j2`)."""
    return _folder("templates")


def runtime_include() -> Path:
    """Return the include folder of the C++ headers, `ktc/*.hpp`."""
    return _folder("runtime") / "include"


def runtime_bindings() -> Path:
    """Return the include folder of Python modules: `ktc_python/*.hpp` and `module.cpp`."""
    return _folder("runtime") / "python"


def runtime_sources() -> Path:
    """Return the folder with C++ sources that are compiled unchanged."""
    return _folder("runtime") / "src"


def rules() -> Path:
    """Return the folder with the bundled rule programs and, under `std`, the patterns they import."""
    return _folder("rules")


def examples() -> Path:
    """Return the folder with the rule programs that are examples, `*.ktr`."""
    return _folder("docs") / "examples"


def hosts() -> Path:
    """Return the folder with the bundled descriptions of machines, `*.toml`."""
    return rules() / "hosts"


def peers() -> Path:
    """Return the folder with the peers of benchmarks, which only a source checkout has."""
    return _folder("benchmarks") / "peers"


def training_data() -> Path:
    """Return the folder with the bundled training data, `*.jsonl`."""
    return _PACKAGE / "training" / "tune" / "data"


@functools.cache
def compiler_digest() -> str:
    """Return a digest of the text of everything in ktc that makes a compiled model, but rules. It takes about 50 ms."""
    parts = ("compiler.py", "foundation", "language/dsl", "model", "stages")
    folders = [*(_PACKAGE / part for part in parts), _folder("runtime"), grammar(), templates()]
    digest = hashlib.sha256()
    for folder in folders:
        files = (file for file in folder.rglob("*") if file.suffix in _COMPILING) if folder.is_dir() else (folder,)
        for file in sorted(files):
            text = file.read_bytes()
            digest.update(f"{file.relative_to(folder)} {len(text)} ".encode())
            digest.update(text)
    return digest.hexdigest()


def _folder(name: str) -> Path:
    bundled = _PACKAGE / "_data"
    root = bundled if bundled.is_dir() else _PACKAGE.parent
    return root / name
