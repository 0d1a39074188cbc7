"""A load test: a server of `ktc serve` in a process of its own, one client, then many.

In: OUT, the loads, options of `ktc serve`. Out: two `Phase`s, and the server's own counts. Refused: a server that does
not start (G725).
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.tools.bench.serving.load import Load, drive
from ktc.tools.bench.serving.report import Phase

_URL: Final = re.compile(r"http://\S+/v1")
_CPU: Final = "process_cpu_seconds_total"
_SETTLED: Final = 30.0  # seconds for the server to end what clients left


@contextmanager
def served(out: Path, options: Sequence[str]) -> Generator[str]:
    """Start a server and yield its URL. Raises InputRefused (G725)."""
    command = [sys.executable, "-m", "ktc", "serve", str(out), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    lines = list[str]()
    assert process.stderr is not None
    try:
        for line in process.stderr:
            lines.append(line)
            if "is served at" in line or (len(lines) > 1 and "is served at" in lines[-2] + line):
                break
        found = _URL.search("".join(lines))
        if found is None:
            process.wait()
            message = f"`ktc serve` did not start: {' '.join(''.join(lines).split())[-300:]}"
            raise InputRefused(Diagnostic("G725", message, hint=f"try `{' '.join(command[2:])}`"))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def measure(url: str, one: Load, many: Load) -> tuple[Phase, Phase, dict[str, float]]:
    """Drive a server with one client, then with many; return both, and the server's counts at the end."""
    asyncio.run(drive(url, replace(one, clients=1, seconds=1, cancelled=0.0)))  # warm
    phases = list[Phase]()
    for seed, load in enumerate((one, many), 1):
        before = _metrics(url).get(_CPU, 0.0)
        outcomes, seconds = asyncio.run(drive(url, load, seed))
        phases.append(Phase.of(load, outcomes, seconds, _metrics(url).get(_CPU, 0.0) - before))
    return phases[0], phases[1], _settled(url)


def _metrics(url: str) -> dict[str, float]:
    """Return every sample of the server's metrics by its name and labels."""
    with urllib.request.urlopen(url.replace("/v1", "/metrics")) as reply:
        lines = reply.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def _settled(url: str) -> dict[str, float]:
    """Return what the server counts, when nothing runs or after a while."""
    names = ("ktc_requests_running", "ktc_requests_waiting", "ktc_requests_total", "ktc_generated_tokens_total")
    end = time.monotonic() + _SETTLED
    while True:
        found = {name: value for name, value in _metrics(url).items() if name.startswith(names)}
        if not (found["ktc_requests_running"] or found["ktc_requests_waiting"]) or time.monotonic() > end:
            return found
        time.sleep(0.2)
