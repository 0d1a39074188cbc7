"""Commands of which one call to the system fails or is the last one.

`fault_shim.cpp` is preloaded into a process and its children. It counts the calls that open, write, flush, rename or
remove below some folders, and at one of them fails with an error or kills the process. What to do and what was done
are in one mapped file, `Control`.

`run_with_fault` starts a command. `Forked` starts a process that has imported what the command needs, and forks it for
every run: a sweep over hundreds of calls takes no start-up of torch for each.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ktc.foundation.host import find_compiler

HERE: Final = Path(__file__).resolve().parent
KILL: Final = "SIGKILL"
ENDING: Final = ("SIGINT", "SIGTERM")  # the command removes what is unfinished, and ends
ERRORS: Final = ("ENOSPC", "EIO", "EROFS", "EDQUOT", "EMFILE")

_READING, _WRITING, _WRITE, _FLUSH, _NAME, _REMOVE = (1 << bit for bit in range(6))
_CHANGES = _WRITING | _WRITE | _FLUSH | _NAME | _REMOVE
_KINDS: Final = {
    "ENOSPC": _CHANGES & ~_REMOVE,  # what removes frees space
    "EDQUOT": _CHANGES & ~_REMOVE,
    "EIO": _CHANGES,
    "EROFS": _CHANGES,
    "EMFILE": _READING | _WRITING,
    "ENFILE": _READING | _WRITING,
    **dict.fromkeys((KILL, *ENDING), _CHANGES),
}
_CONTROL: Final = struct.Struct("=QQQiIII4096s1024s")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at call number `at` below `folders`, counted from 1; with 0 calls are only counted.

    `error` is the name of an errno or of a signal. `lasting`: every later call fails too, as on a disk that stays full.
    """

    folders: tuple[str, ...]
    error: str
    at: int = 0
    lasting: bool = False

    def control(self) -> bytes:
        """Return the content of the mapped file before the run."""
        ending = -getattr(signal, self.error) if self.error in ENDING else 0
        number = 0 if self.error == KILL else ending or getattr(errno, self.error)
        folders = "\n".join(os.path.realpath(folder) for folder in self.folders).encode()
        assert len(folders) < 4096
        return _CONTROL.pack(self.at, 0, 0, number, self.lasting, _KINDS[self.error], 0, folders, b"")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: its exit code (minus the number of the signal that killed it) and its output.

    `calls` were counted, `injected` of them failed, `where` is the first of these: the call and its path.
    """

    code: int
    out: str
    err: str
    calls: int
    injected: int
    where: str

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


def shim() -> Path:
    """Return the shim as a shared library, compiled once per text."""
    source = HERE / "fault_shim.cpp"
    name = f"ktc-fault-shim-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.is_file():
        compiler = find_compiler()
        assert compiler is not None, "the shim needs a C++ compiler"
        draft = library.with_suffix(f".{os.getpid()}")
        flags = ("-std=c++20", "-O1", "-shared", "-fPIC", "-D_GNU_SOURCE")
        subprocess.run([compiler.path, *flags, str(source), "-o", str(draft), "-ldl"], check=True)
        draft.rename(library)
    return library


def result_of(control: bytes) -> tuple[int, int, str]:
    """Return the calls, the injected faults and the place of the first one from the mapped file after a run."""
    _, calls, injected, *_, where = _CONTROL.unpack(control)
    return calls, injected, where.rstrip(b"\0").decode()


def run_with_fault(
    command: Sequence[str], fault: Fault, *, env: Mapping[str, str] | None = None, cwd: Path | None = None,
    timeout: float = 600,
) -> Outcome:  # fmt: skip
    """Run a command (`[sys.executable, "-m", "ktc", ...]`) with the fault."""
    with _control_file() as file:
        control = file.name
        _write(control, fault)
        environment = {**os.environ, **(env or {}), **_preloaded(control)}
        ended = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=timeout,
            check=False,
        )  # fmt: skip
        return Outcome(ended.returncode, ended.stdout, ended.stderr, *result_of(Path(control).read_bytes()))


class Forked(AbstractContextManager["Forked"]):
    """A process in which ktc and its libraries are imported; every run of a command is a fork of it."""

    def __init__(self, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        self._file = _control_file()
        self._control = self._file.name
        _write(self._control, Fault(("/nowhere",), KILL))
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forking.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {}), **_preloaded(self._control)}, cwd=cwd,
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._file.close()

    def run(
        self, arguments: Sequence[str], fault: Fault, *, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> Outcome:
        """Run `ktc` with these arguments in a fork. A run that takes longer than `timeout` seconds is killed."""
        _write(self._control, fault)
        found = self._ask({"run": list(arguments), "env": dict(env or {}), "timeout": timeout})
        counted = result_of(Path(self._control).read_bytes())
        return Outcome(found["code"], found["out"], found["err"], *counted)

    def warm(self, arguments: Sequence[str]) -> tuple[Outcome, list[str]]:
        """Run it in a fork, and import in the process what that imported. It has to succeed. Return the modules too."""
        _write(self._control, Fault(("/nowhere",), KILL))
        found = self._ask({"run": list(arguments), "env": {}, "timeout": 600, "learn": True})
        assert found["code"] == 0, found["err"]
        return Outcome(found["code"], found["out"], found["err"], 0, 0, ""), found["modules"]

    def learn(self, modules: Sequence[str]) -> None:
        """Import these modules in the process."""
        self._ask({"import": list(modules)})

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _write(control: str, fault: Fault) -> None:
    """Write in place: the file is mapped, and must not become shorter for a moment."""
    with open(control, "r+b") as file:
        file.write(fault.control())


def _preloaded(control: str) -> dict[str, str]:
    return {"LD_PRELOAD": str(shim()), "KTC_FAULTS": control}


def _control_file() -> tempfile._TemporaryFileWrapper[bytes]:
    return tempfile.NamedTemporaryFile(prefix="ktc-faults-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def main() -> None:
    """`python faults.py ERROR AT FOLDER... -- COMMAND...`: run a command with a fault, and print how it ended."""
    words = sys.argv[1:]
    split = words.index("--")
    error, at, *folders = words[:split]
    outcome = run_with_fault(words[split + 1 :], Fault(tuple(folders), error, int(at)))
    print(json.dumps(asdict(outcome), indent=2))


if __name__ == "__main__":
    main()
