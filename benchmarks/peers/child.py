"""A peer in a process of its own, which answers one JSON line per request: `{"do": ..., "with": {...}}`.

Its stderr is kept for the message of its end. `{"error": ...}` is the answer to a request that failed.
"""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast


class Child:
    """A process of another environment's Python that runs the program `worker`; it always ends with `stack`.

    Raises `RuntimeError` if it cannot be started. `about` is for its caller.
    """

    in_process = False

    def __init__(self, python: Path, worker: Path, timeout: float, stack: ExitStack) -> None:
        self.about: dict[str, Any] = {}
        self._timeout = timeout
        command = [str(python), "-I", str(worker)]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the stack)
        stack.callback(self._said.close)
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said)
        except OSError as error:
            raise RuntimeError(f"`{python}` cannot be run: {error.strerror}") from error
        stack.callback(self._end)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a line, and return the object of the line that answers it.

        Raise `RuntimeError` with the process's own message if it failed, or with how it ended.
        """
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        try:
            pipes[0].write(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
            pipes[0].flush()
        except BrokenPipeError as error:
            raise RuntimeError(self._ended()) from error
        ready, _, _ = select.select([pipes[1]], [], [], self._timeout)
        if not ready:
            raise RuntimeError(f"no answer to `{do}` in {self._timeout} s")
        line = pipes[1].readline()
        if not line:
            raise RuntimeError(self._ended())
        return _answer(line)

    def _ended(self) -> str:
        """Return its exit status and its last output."""
        status = self._process.wait(timeout=10)
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"its process ended with status {status}: {last}"

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


def _answer(line: bytes) -> dict[str, Any]:
    """Return the object in a line of the child. Raise RuntimeError if it is invalid or reports an error."""
    try:
        found: object = json.loads(line)
    except ValueError as error:
        raise RuntimeError(f"its process answered no JSON: {line[:80]!r}") from error
    if not isinstance(found, dict):
        raise RuntimeError(f"its process answered no object: {line[:80]!r}")
    answer = cast("dict[str, Any]", found)
    if "error" in answer:
        raise RuntimeError(str(answer["error"]))
    return answer
