"""`ktc bench serve`: a server of `ktc serve` in a process of its own, one client, then many.

In: a request. Out: the figures of two loads, and the server's own counts. Refused: a server that does not start (G725).
A lost or failed request is an error (G726), after the figures are shown.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.serving.server import require_server
from ktc.tools.bench.load import Load, Outcome, drive
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import Report, column, table_of
from ktc.tools.bench.requests import Serve

if TYPE_CHECKING:
    from rich.table import Table

_URL: Final = re.compile(r"http://\S+/v1")
_CPU: Final = "process_cpu_seconds_total"
_SETTLED: Final = 30.0  # seconds for the server to end what clients left


Percentiles = tuple[float, float]


def _latency(head: str, name: str) -> Any:
    return column(head, lambda phase: "{:.3f} / {:.3f}".format(*getattr(phase, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The figures of one load. `failed` has each failure with its count; latencies are p50 and p99 in seconds.

    `cpu_seconds` are the server's: on a busy machine they say more than the time that passes. Ratios are of the
    tokens per second of one client.
    """

    clients: int = column("clients")
    seconds: float
    answered: int = column("answered")
    cancelled: int = column("cancelled")
    failed: Mapping[str, int] = column("failed", lambda phase: str(sum(phase.failed.values())))
    tokens: int
    tokens_per_second: float = column("token/s", "{:.1f}")
    ratio: float = column("ratio", "{:.2f}x", default=0.0)
    cpu_seconds: float
    tokens_per_cpu_second: float = column("token/CPU s", "{:.1f}")
    ratio_of_cpu_time: float = column("ratio", "{:.2f}x", default=0.0)
    first_token: Percentiles = _latency("first token s p50/p99", "first_token")
    next_token: Percentiles = _latency("next token s p50/p99", "next_token")
    request: Percentiles = _latency("request s p50/p99", "request")

    @classmethod
    def of(cls, load: Load, outcomes: Sequence[Outcome], seconds: float, cpu_seconds: float) -> Phase:
        """Return the figures of a load that took `seconds` in all, and `cpu_seconds` of the server."""
        states = Counter(outcome.state for outcome in outcomes)
        answered, cancelled = states.pop("answered", 0), states.pop("cancelled", 0)
        tokens = sum(outcome.tokens for outcome in outcomes)
        return cls(
            clients=load.clients,
            seconds=seconds,
            answered=answered,
            cancelled=cancelled,
            failed=dict(states),
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            cpu_seconds=cpu_seconds,
            tokens_per_cpu_second=tokens / cpu_seconds if cpu_seconds else 0.0,
            first_token=_percentiles(outcome.first for outcome in outcomes if outcome.first is not None),
            next_token=_percentiles(gap for outcome in outcomes for gap in outcome.gaps),
            request=_percentiles(outcome.seconds for outcome in outcomes if outcome.state == "answered"),
        )

    def beside(self, one: Phase) -> Phase:
        """Return the figures with their ratios to those of one client."""
        ratio = self.tokens_per_second / one.tokens_per_second if one.tokens else 0.0
        of_cpu = self.tokens_per_cpu_second / one.tokens_per_cpu_second if one.tokens_per_cpu_second else 0.0
        return replace(self, ratio=ratio, ratio_of_cpu_time=of_cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport(Report):
    """`server` are the server's metrics at the end."""

    one_client: Phase
    clients: Phase
    server: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`; a ratio to nothing is None."""
        both = {name: getattr(self.clients, name) or None for name in ("ratio", "ratio_of_cpu_time")}
        return {**asdict(self), **both}

    def shown(self) -> Iterator[str | Table]:
        """Yield a row for one client and one for many."""
        yield table_of((self.one_client, self.clients))

    @property
    def fault(self) -> Diagnostic | None:
        """G726 for lost and failed requests."""
        failed = {**self.one_client.failed, **self.clients.failed}
        if not failed:
            return None
        message = f"{sum(failed.values())} requests were lost or failed: {', '.join(list(failed)[:3])}"
        return Diagnostic("G726", message, hint="the server's log says more")


def run(request: Serve, sink: ProgressSink) -> ServeReport:
    """Start the server and load it."""
    require_server()
    lengths = request.prompt, request.new_tokens
    sink.progress("starting the server", 0, 0)
    with served(request.out, ["--max-batch", str(request.max_batch)]) as url:
        sink.progress("one client, then many", 0, 0)
        return measure(
            url,
            Load(1, request.one_seconds, *lengths, 0.0),
            Load(request.clients, request.seconds, *lengths, request.cancelled),
        )


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
        match = _URL.search("".join(lines))
        if match is None:
            process.wait()
            message = f"`ktc serve` did not start: {' '.join(''.join(lines).split())[-300:]}"
            raise InputRefused(Diagnostic("G725", message, hint=f"try `{' '.join(command[2:])}`"))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield match[0]
    finally:
        process.terminate()
        process.wait()


def measure(url: str, one: Load, many: Load) -> ServeReport:
    """Drive a server with one client, then with many."""
    asyncio.run(drive(url, replace(one, clients=1, seconds=1, cancelled=0.0)))  # warm
    phases = list[Phase]()
    for seed, load in enumerate((one, many), 1):
        before = _metrics(url).get(_CPU, 0.0)
        outcomes, seconds = asyncio.run(drive(url, load, seed))
        phase = Phase.of(load, outcomes, seconds, _metrics(url).get(_CPU, 0.0) - before)
        phases.append(phase.beside(phases[0] if phases else phase))
    return ServeReport(one_client=phases[0], clients=phases[1], server=_settled(url))


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
        counts = {name: value for name, value in _metrics(url).items() if name.startswith(names)}
        if not (counts["ktc_requests_running"] or counts["ktc_requests_waiting"]) or time.monotonic() > end:
            return counts
        time.sleep(0.2)


def _percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    if not ordered:
        return 0.0, 0.0
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
