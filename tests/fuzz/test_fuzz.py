"""Some mutants of every kind of input, what mutation has found so far, and what no reader of ktc may do.

`make fuzz` goes on for a time. A fault that it finds becomes a file `found/KIND/WHAT--FILE`.
"""

from __future__ import annotations

import ast
import math
import os
import shutil
import socket
from pathlib import Path
from random import Random

import pytest
from parsed_sources import trees

from fuzz.fuzzing import Kind, outcome, run
from fuzz.kinds import KINDS
from ktc.foundation.machine_faults import fault_in
from ktc.foundation.regular_files import name_fault, open_regular, read_regular, require_regular

SEED = 20
MUTANTS = {"rules": 60, "runs": 60}
NAMED = {kind.name: kind for kind in KINDS}
FOUND = sorted(path for path in (Path(__file__).parent / "found").rglob("*--*"))
READS = {
    "mutant.ktr": "rules",
    "host.toml": "hosts",
    "train.yaml": "settings",
    "config.json": "configs",
    "model.safetensors": "headers",
    "model.safetensors.index.json": "indices",
    "ktc.json": "manifests",
    "lora.json": "lora",
    "packed/packed.json": "packed",
    "adapter_config.json": "adapters",
    "adapter_model.safetensors": "adapters",
    "adapter_ktc.json": "adapters",
    "model.gguf": "gguf",
    "weights.json": "weights",
    "prompts.jsonl": "questions",
    "data.json": "data",
    "data.txt": "data",
    "tokenizer.json": "tokenizers",
    "data.jsonl": "data",
    "questions.jsonl": "questions",
    "graph.json": "records",
    "ktc_conversion.json": "records",
    "generation_config.json": "generation",
    "tokenizer_config.json": "tokenizers",
    "optimize.yaml": "kt-yaml",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_whole_inputs_are_accepted_and_mutants_refused_or_sound(kind: Kind, tmp_path: Path) -> None:
    for original in kind.prepare(tmp_path):
        if kind.name == "rules":
            break  # they include those of `fail`
        (tmp_path / original.file).write_bytes(original.content)
        assert outcome(kind, tmp_path) == ("accepted", True)
    found = run(kind, tmp_path / "mutants", None, Random(SEED), seconds=math.inf, most=MUTANTS.get(kind.name, 150))
    assert found.faults == {}
    assert found.refused


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name.partition('--')[0]}")
def test_what_was_found_is_refused(path: Path, tmp_path: Path) -> None:
    kind = NAMED[path.parent.name]
    kind.prepare(tmp_path)
    shutil.copyfile(path, tmp_path / path.name.partition("--")[2].replace("--", "/"))
    reason, accepted = outcome(kind, tmp_path)
    assert not accepted, reason


# Files that are none -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["a pipe", "a socket", "a folder", "a device", "a loop", "a terabyte"])
@pytest.mark.parametrize("file", READS)
def test_what_is_no_file_is_refused_without_waiting(file: str, what: str, tmp_path: Path) -> None:
    kind = NAMED[READS[file]]
    kind.prepare(tmp_path)
    _replace(tmp_path / file, what)
    reason, accepted = outcome(kind, tmp_path)
    assert not accepted, reason


NAMES = ("a" * 5000, "a/" * 3000, "a\x00b", "\ud800", "../" * 50 + "none", "\udcff")


def _replace(path: Path, what: str) -> None:
    path.unlink()
    match what:
        case "a pipe":
            os.mkfifo(path)
        case "a socket":
            with socket.socket(socket.AF_UNIX) as made:
                here = Path.cwd()
                os.chdir(path.parent)  # the name of a socket has 108 bytes at most
                try:
                    made.bind(path.name)
                finally:
                    os.chdir(here)
        case "a folder":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")
        case "a terabyte":
            path.touch()
            os.truncate(path, 1 << 40)  # without any block
        case _:
            path.symlink_to(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_file_can_have_is_an_error_of_the_system(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)[:20]):
        open_regular(tmp_path / name)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(bytes(10))
    assert read_regular(tmp_path / "a.json", 10) == bytes(10)
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_regular(tmp_path / "a.json", 9)
    with pytest.raises(OSError, match="more than 9 bytes"):
        require_regular(tmp_path, ["*.json"], 9)
    with pytest.raises(OSError, match="a device"):
        read_regular(Path("/dev/zero"), 9)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a terabyte"])
def test_what_is_no_readable_file_is_no_fault_of_the_machine(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    _replace(tmp_path / "config.json", kind)
    with pytest.raises(OSError, match="config") as raised:
        read_regular(tmp_path / "config.json")
    assert fault_in(raised.value) is None
    assert "cannot be opened" in name_fault(raised.value)


def test_a_name_that_is_no_utf8_is_read(tmp_path: Path) -> None:
    name = b"\xff.json".decode("utf-8", "surrogateescape")
    (tmp_path / name).write_bytes(b"{}")
    assert read_regular(tmp_path / name) == b"{}"


# Code of a file -------------------------------------------------------------------------------------------------------
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
COMPILED = {"ktc/model/loading/graph_block.py"}  # the code of a block, which its manifest seals


def test_nothing_that_is_read_is_run() -> None:
    faults = [
        f"{file}:{node.lineno} {ast.unparse(node.func)}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and file not in COMPILED and runs_code(node)
    ]
    assert faults == []


def runs_code(call: ast.Call) -> bool:
    """Whether a call runs code that it is given, or may run code of a file."""
    if not isinstance(call.func, ast.Name | ast.Attribute):
        return False
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        name in RUNS_CODE
        or (name == "torch.load" and given.get("weights_only") != "True")
        or (name.startswith("yaml.") and name.endswith(("load", "load_all")) and not name.startswith("yaml.safe_"))
        or (name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False")
    )


def test_no_file_of_ktc_imports_a_reader_of_pickles() -> None:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & PICKLES, file
