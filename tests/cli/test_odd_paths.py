"""Every argument of a command that names a file or folder, given what is none: refused at once, never a bug of ktc."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ktc.cli import app as cli

SECONDS = 60  # of one command, which waits for nothing and loads no model

# X is the argument; OUT is a compiled model, MODEL its checkpoint, ADAPTER one of it, DATA data, NEW a free place.
COMMANDS = (
    "check X.ktr",
    "fmt --check X.ktr",
    "check moe-lora X",
    "check moe-lora MODEL --host X.toml",
    "compile X moe-lora -o NEW",
    "compile MODEL X.ktr -o NEW",
    "graph --diff X.json X.json",
    "import-kt-yaml X.yaml",
    "verify X",
    "pack X",
    "train OUT --data X.jsonl --output NEW",
    "train OUT --data DATA --config X.yaml --output NEW",
    "train OUT --data DATA --resume X --output NEW",
    "generate OUT --prompts X.jsonl",
    "generate OUT --adapter X",
    "eval OUT --data X.jsonl",
    "export X -o NEW",
    "export ADAPTER --model X -o NEW",
    "merge X -o NEW",
    "quantize X -o NEW",
    "prove OUT --text X.txt",
    "lf X.yaml",
    "serve OUT --updates MODEL --update-key X",
    "serve OUT --adapter X",
    "bench decode --model X",
)


def odd_paths(folder: Path, ending: str) -> dict[str, str]:
    """Make what is no file of the wanted kind. Return the paths by what they are."""
    pipe, device, sparse, loop = (folder / f"{name}{ending}" for name in ("pipe", "device", "sparse", "loop"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    loop.symlink_to(loop)
    return {
        "a pipe": str(pipe),
        "a device": str(device),
        "a terabyte": str(sparse),
        "a loop": str(loop),
        "a long name": "a" * 5000 + ending,
        "a long path": "a/" * 3000 + ending,
        "no UTF-8": os.fsdecode(bytes(folder) + b"/\xff\xfe" + ending.encode()),
        "memory": "/proc/self/mem",
    }


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_file_is_refused_at_once(
    command: str,
    compiled: Path,
    checkpoint: Path,
    adapter: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    places = {"OUT": compiled, "MODEL": checkpoint, "ADAPTER": adapter, "DATA": data, "NEW": tmp_path / "new"}
    word = next(word for word in command.split() if word[0] == "X")
    for what, path in odd_paths(tmp_path, word[1:]).items():
        asked = [path if each == word else str(places.get(each, each)) for each in command.split()]
        signal.alarm(SECONDS)  # ends the test's process: nothing that waits for a pipe would come back
        code = cli.main([*asked, "--json"])
        signal.alarm(0)
        said = "".join(capfd.readouterr())
        failing = {3} if what == "memory" else set()  # its reads fail with EIO, as those of a broken disk
        assert code in {1, 2} | failing, (what, code, said[-500:])
        assert "U099" not in said, (what, said[-500:])
        assert not re.search("No such (command|option)", said), said[-500:]
        assert "Traceback" not in said, (what, said[-500:])
