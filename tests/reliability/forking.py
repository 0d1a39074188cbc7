"""The process that `faults.Forked` starts: it runs commands of ktc in forks of itself, one JSON object per line.

In: `{"run": arguments, "env": variables, "timeout": seconds, "learn": whether to import what the run imported}`. Out:
`{"code", "out", "err", "modules"}`. Or in: `{"import": modules}`, and out: `{}`. The shim is preloaded; the driver has
written what is to fail.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, object]:
    """Run the command in a fork, wait for it, and return how it ended; or import modules."""
    if "import" in request:
        learn(request["import"])
        return {}
    with tempfile.TemporaryDirectory(prefix="forking-", dir="/dev/shm") as name:
        out, err, modules = (Path(name) / each for each in ("out", "err", "modules"))
        child = os.fork()
        if child == 0:
            os.environ.update(request["env"])
            run(request["run"], out, err, modules if request.get("learn") else None)
        code = ended(child, request["timeout"])
        imported = modules.read_text().split() if modules.is_file() else []
        learn(imported)
        said = {name: path.read_text(errors="replace") for name, path in (("out", out), ("err", err))}
        return {"code": code, **said, "modules": imported}


def run(arguments: list[str], out: Path, err: Path, modules: Path | None) -> None:
    """Be the command: its own session, its output in files. Does not return."""
    os.setsid()
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), number)
    code = 70
    try:
        from ktc.cli import app

        code = app.main(arguments)
        if modules is not None:
            modules.write_text("\n".join(sys.modules))
    except BaseException:  # noqa: BLE001  # the fork ends here, whatever happened
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(child: int, timeout: float) -> int:
    """Return the child's exit code; one that hangs is killed, which reads as -9 too late."""
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.002)
    with suppress(ProcessLookupError):  # compilers of a killed command would go on, and count as the next one's
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def learn(names: list[str]) -> None:
    """Import these modules, except for those that only the run could make."""
    for name in names:
        if name not in sys.modules and not name.startswith(("__", "e2e_", "_pytest")):
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001  # a module that a run makes is not there for others
                continue


def main() -> None:
    """Answer until there are no more requests."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print while they are imported is no answer
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
