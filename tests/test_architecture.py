"""The layers import downwards only, and importing ktc costs nothing."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

# Where the compiled world must not be needed: importing any of these fails.
BLOCKED = "import sys; [sys.modules.__setitem__(name, None) for name in ('torch', 'transformers', 'peft', 'numpy')]; "


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env=environment
    )


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([linter, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_importing_ktc_needs_no_torch_and_does_nothing(tmp_path: Path) -> None:
    code = (
        BLOCKED + "before = set(sys.modules); import ktc; print(sorted(m for m in sys.modules if m.startswith('ktc')))"
    )
    assert python(code).stdout == "['ktc']\n"


def test_the_public_names_are_all_there() -> None:
    code = "import ktc; assert all(callable(getattr(ktc, name)) for name in ktc.__all__[2:]); ktc.nothing"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python(code)
    assert "module `ktc` has no attribute `nothing`" in caught.value.stderr


# For each command line: at most so many modules of ktc with code, and packages that must not be imported.
_MODELS = ("torch", "transformers", "peft", "numpy", "jinja2", "graphlay", "psutil")
_LATER_STAGES = ("peft", "trl", "datasets", "graphlay", "ktc.stages.proof", "ktc.stages.codegen", "ktc.stages.link",
                 "ktc.training", "ktc.adapters", "ktc.inference", "ktc.tools")  # fmt: skip
IMPORTS = {
    "--version": (46, ("rich", "lark", "ktc.language.dsl", "ktc.foundation.host", *_MODELS)),
    "--help": (46, ("lark", "ktc.language.dsl", "ktc.foundation.host", *_MODELS)),
    "compile --help": (46, ("lark", "ktc.language.dsl", "ktc.foundation.host", *_MODELS)),
    "explain E040": (47, ("rich", "lark", "ktc.language.dsl", "ktc.foundation.host", *_MODELS)),
    "fmt --check rules": (104, ("ktc.foundation.host", "ktc.compiler", *_MODELS)),
    "check moe-lora": (106, ("ktc.foundation.host", "ktc.compiler", "ktc.language.explain", *_MODELS)),
    "import ktc": (1, _MODELS),
    "import ktc.compiler": (249, _LATER_STAGES),  # what `ktc check RULES MODEL` imports beyond the command line
}

# One process: each command line runs in a fork of it, which answers with the modules that it has imported.
_ASK = """
import json, os, sys
def answer(line):
    if line.startswith("import "):
        __import__(line.removeprefix("import "))
    else:
        from ktc.cli.app import main
        assert main(line.split()) == 0, line
    return sorted(sys.modules)
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for line in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        answers.write(json.dumps([line, answer(line)]) + "\\n")
        answers.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, line
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    return dict(json.loads(line) for line in python(_ASK, *IMPORTS).stdout.splitlines())


@pytest.mark.parametrize("line", IMPORTS)
def test_a_command_imports_what_it_needs_and_no_more(imported: dict[str, list[str]], line: str) -> None:
    most, forbidden = IMPORTS[line]
    found = [name for name in imported[line] if any(name == each or name.startswith(f"{each}.") for each in forbidden)]
    assert not found
    assert len([name for name in imported[line] if name.split(".")[0] == "ktc" and not _is_a_sentence(name)]) <= most


def _is_a_sentence(name: str) -> bool:
    """Whether a module is the `__init__` of a room that has a docstring alone: it costs next to nothing to import."""
    package = ROOT.joinpath(*name.split("."), "__init__.py")
    return package.exists() and len(ast.parse(package.read_text(encoding="utf-8")).body) == 1


def test_no_file_reads_the_environment_but_its_own_and_cli() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ktc").rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in ("os.environ", "os.getenv", "getenv("))
    ]
    assert set(readers) <= {"ktc/foundation/environment.py", "ktc/cli/app.py", "ktc/cli/session.py"}


_LONGEST = 60  # lines of a function, from `def` to its last; commands of `cli` declare an option per line


def test_no_function_outside_cli_is_long() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
        for path in (ROOT / "ktc").rglob("*.py")
        if "cli" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > _LONGEST
    ]


_SAY_NOTHING = frozenset(
    {"each", "found", "held", "own"}
)  # fit everything: docs/details/glossary.md, "The law for names"
_UNTOUCHED = ("model/checkpoint/gguf_header.py",)
# Fields of results, whose names are keys of `--json`.
_JSON_KEYS = (
    ("adapters/export.py", "found"), ("adapters/export_check.py", "found"), ("cli/doctor.py", "found"),
    ("model/packing/verify.py", "found"),
)  # fmt: skip


def test_names_say_what_things_are() -> None:
    """No variable or parameter of the package has a name that fits everything."""
    package = ROOT / "ktc"
    faults = [
        f"{file.relative_to(package)}:{line} {name}"
        for file in package.rglob("*.py")
        if file.relative_to(package).as_posix() not in _UNTOUCHED
        for line, name in _bound_names(ast.parse(file.read_text(encoding="utf-8")))
        if name in _SAY_NOTHING and (file.relative_to(package).as_posix(), name) not in _JSON_KEYS
    ]
    assert not faults


def _bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


# An import of a name of ktc, also in a string of code that a test runs in another process, or in a document.
_IMPORT = re.compile(
    r"\bfrom (ktc(?:\.\w+)*) import (\([^)]*\)|[\w, ]+)|\bimport (ktc(?:\.\w+)+)|-m\W{1,5}(ktc(?:\.\w+)+)"
)


def test_imports_in_tests_benchmarks_and_documents_name_what_exists() -> None:
    """By the text of the files: also of slow tests, and of code for other environments."""
    trees = ("tests", "benchmarks", "docs", "Makefile", "README.md", "CONTRIBUTING.md")
    paths = (path for tree in trees for path in (ROOT / tree, *(ROOT / tree).rglob("*")))
    files = [path for path in paths if path.is_file() and path.suffix in (".py", ".md", ".sh", "")]
    imported = {(name, file) for file in files for name in _imported(file.read_text(encoding="utf-8"))}
    assert len(imported) > 1000
    assert not [f"{file.relative_to(ROOT)}: {name}" for name, file in sorted(imported) if not _exists(name)]


def _imported(text: str) -> Iterator[str]:
    """Yield the dotted names that a text imports."""
    for module, names, *whole in _IMPORT.findall(text):
        listed = (name.split()[0] for name in re.sub(r"#.*|[()]", "", names).split(",") if name.strip())
        yield from (f"{module}.{name}" for name in listed)
        yield from filter(None, whole)


@functools.cache
def _exists(name: str) -> bool:
    """Return whether a dotted name is a module, or a word in the file of its parent."""
    parent, _, last = name.rpartition(".")
    return _source(name) != "" or re.search(rf"\b{last}\b", _source(parent)) is not None


@functools.cache
def _source(module: str) -> str:
    """Return the text of a module or of a package's `__init__.py`; "" where there is none."""
    place = ROOT.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""
