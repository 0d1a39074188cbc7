"""Private names of other packages stand in the files `private_api.py`, and nowhere else.

Each of these files has a test beside it that every name is there and means what ktc takes it for. `make versions` runs
these tests with the oldest and the newest supported releases.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from parsed_sources import trees


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def own_names() -> set[str]:
    """Private names that ktc itself defines."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return defined | {name for name in stored if f"self.{name}" in own}


def foreign(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of other packages in a file: attributes, names given to `getattr`, and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "os")):
                continue  # `os._exit` is documented
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[ast.Name(id="self"), *_]):
                continue
            case ast.Attribute(value=ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="ops"))):
                continue  # an operator of ATen
            case ast.Attribute(value=value, attr=name) if is_private(name):
                if name not in own or "super()" in ast.unparse(value):
                    yield name
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, key, *_]):
                if isinstance(key, ast.Constant) and is_private(str(key.value)):
                    yield str(key.value)
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("ktc"):
                yield from filter(is_private, [*module.split("."), *(alias.name for alias in names)])


def test_private_names_stand_in_files_of_their_own() -> None:
    own = own_names()
    found = {Path(file): set(foreign(tree, own)) for file, tree in trees().items()}
    assert {str(path): names for path, names in found.items() if names and path.name != "private_api.py"} == {}
    for path in (path for path in found if path.name == "private_api.py"):
        assert Path("tests", *path.relative_to("ktc").parts[:-1], "test_private_api.py").exists(), path


def test_foreign_names_are_found(tmp_path: Path) -> None:
    text = "from torch.utils import _pytree\nx._secret\ngetattr(x, '_hidden')\nsuper()._own()\nself._own\nx._own"
    assert sorted(foreign(ast.parse(text), {"_own"})) == ["_hidden", "_own", "_pytree", "_secret"]
