"""200 clients attack `ktc serve` for a time: good, malformed, abandoned and unfinished requests. What was lost?

    python -m reliability.soak [SECONDS] [--clients 200] [--signals 1] [--jobs 1] [--model OUT] [-o FILE] [--json]

(with tests and tests/support on the path). The server runs in a process of its own, with a tiny model that is compiled
first. Each good request, greedy, has to be answered with the text that it had before the attack, or refused with 429;
each row of `tests/inference/serving/attacks` with its own status. Afterwards nothing may run or wait, and memory,
descriptors and threads may not have grown between the second and the last quarter. Then SIGTERM, SIGINT and SIGKILL
come while an answer is streamed. Exit code 1 where something was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import psutil
from server_attacks import Attack, answer, attacks, post

PROMPT: Final = "Rain falls"
GOOD: Final = post("completions", json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0}).encode())
LONG: Final = post("completions", json.dumps({"prompt": PROMPT, "max_tokens": 300, "stream": True}).encode())
METRICS: Final = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LARGEST: Final = 200_000  # bytes of a malformed request: larger ones are sent once, by the tests
PATIENCE: Final = 120.0  # seconds for one answer
GRACE: Final = "120"  # seconds for an answer at the end, also beside other programs
SAMPLES: Final = 100  # of memory, descriptors and threads
GROWTH: Final = 1.1  # of the memory between quarters
# Chances: the good, the malformed, those that are abandoned; the rest never end.
SHARES: Final = (0.4, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server's process has: memory in bytes, descriptors, threads."""

    seconds: float
    memory: int
    descriptors: int
    threads: int


@dataclass(slots=True)
class Report:
    """What clients saw, samples of the server, how it ended by each signal, and what was lost."""

    seconds: float
    clients: int
    seed: int
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    samples: list[Sample] = field(default_factory=list[Sample])
    after: Sample | None = None
    signals: dict[str, str] = field(default_factory=dict[str, str])
    lost: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Server:
    """A process of `ktc serve`, its port, and the file of its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def sample(self, seconds: float) -> Sample:
        process = psutil.Process(self.process.pid)
        with process.oneshot():
            return Sample(seconds, process.memory_info().rss, process.num_fds(), process.num_threads())

    def metric(self, name: str) -> float:
        page = answer(self.port, METRICS).body.decode()
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


@contextmanager
def serving(model: Path, log: Path, temporary: Path | None = None) -> Generator[Server]:
    """Serve a model on a free port. Raises RuntimeError where it does not start within five minutes."""
    env = {**os.environ, **({} if temporary is None else {"TMPDIR": str(temporary)})}
    command = [sys.executable, "-m", "ktc", "serve", str(model), "--reference", "--port", "0", "--grace", GRACE]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL, env=env)
    try:
        yield Server(process, _port(process, log), log)
    finally:
        process.kill()
        process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    until = time.monotonic() + 300  # beside other programs
    while process.poll() is None and time.monotonic() < until:
        if found := re.search(r"127\.0\.0\.1:(\d+)/v1", log.read_text(encoding="utf-8")):
            return int(found[1])
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')[-2000:]}")


class Clients:
    """Threads that send requests until a time, and count what became of them."""

    def __init__(self, server: Server, seed: int, until: float) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._server, self._seed, self._until = server, seed, until
        self._rows = [row for row in attacks() if len(row.sent) < LARGEST]
        self._lock = threading.Lock()
        self._text = _text(answer(server.port, GOOD, PATIENCE).body)

    def run(self, number: int) -> None:
        """Be one client."""
        chance = Random(f"{self._seed}-{number}")
        good, malformed, abandoned = SHARES
        while time.monotonic() < self._until:
            kind = chance.random()
            try:
                if kind < good:
                    self._good()
                elif kind < malformed:
                    self._malformed(chance.choice(self._rows))
                elif kind < abandoned:
                    self._abandoned(chance)
                else:
                    self._unfinished(chance)
            except OSError as error:
                self._count(f"no connection: {type(error).__name__}")

    def _count(self, outcome: str, wrong: str = "") -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if wrong and len(self.wrong) < 20:
                self.wrong.append(wrong)

    def _good(self) -> None:
        found = answer(self._server.port, GOOD, PATIENCE)
        if found.status == 429:
            self._count("good, refused as too many (429)")
        elif found.status == 200 and _text(found.body) == self._text:
            self._count("good, answered with the expected text")
        else:
            self._count("good, LOST", f"a good request: {found.status} {found.body[:200]!r}")

    def _malformed(self, row: Attack) -> None:
        found = answer(self._server.port, row.sent, PATIENCE)
        if found.status == row.status:
            self._count("malformed, refused with its status")
        elif found.status == 429:
            self._count("malformed, refused as too many (429)")
        else:
            self._count("malformed, WRONG", f"{row.name}: {found.status}, not {row.status}")

    def _abandoned(self, chance: Random) -> None:
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": chance.random() < 0.5}
        with socket.create_connection(("127.0.0.1", self._server.port), PATIENCE) as connection:
            connection.sendall(post("completions", json.dumps(body).encode()))
            time.sleep(chance.random())
        self._count("abandoned in the line or mid-stream")

    def _unfinished(self, chance: Random) -> None:
        part = GOOD[: chance.randrange(1, len(GOOD))]
        with socket.create_connection(("127.0.0.1", self._server.port), PATIENCE) as connection:
            for at in range(0, len(part), 40):
                connection.sendall(part[at : at + 40])
                time.sleep(0.05)
        self._count("slow, and never ended")


def _text(body: bytes) -> str:
    return json.loads(body)["choices"][0]["text"]


def attack(server: Server, report: Report) -> None:
    """Run the clients, sample the server, and look at what it has afterwards."""
    begun = time.monotonic()
    clients = Clients(server, report.seed, begun + report.seconds)
    threads = [threading.Thread(target=clients.run, args=(number,)) for number in range(report.clients)]
    for thread in threads:
        thread.start()
    for number in range(1, SAMPLES + 1):
        time.sleep(max(0.0, begun + number * report.seconds / SAMPLES - time.monotonic()))
        if server.process.poll() is not None:
            break
        report.samples.append(server.sample(time.monotonic() - begun))
    for thread in threads:
        thread.join()
    report.outcomes, report.lost = dict(clients.outcomes), clients.wrong
    if server.process.poll() is not None:
        report.lost.append(f"the server ended with {server.process.returncode}")
        return
    report.lost += _left(server)
    report.after = server.sample(time.monotonic() - begun)
    report.lost += _grown(report)
    if traces := server.log.read_text(encoding="utf-8").count("Traceback"):
        report.lost.append(f"{traces} traces in the log")


def _left(server: Server) -> list[str]:
    """Wait until what clients left has ended, and return what has not within ten seconds."""
    names = ("ktc_requests_running", "ktc_requests_waiting")
    until = time.monotonic() + 10
    while (left := [name for name in names if server.metric(name)]) and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(1)  # connections close after the last request
    return [f"{name} is {server.metric(name):g} after the attack" for name in left]


def _grown(report: Report) -> list[str]:
    quarter = len(report.samples) // 4
    if quarter < 5 or report.after is None:
        return []
    second, last = report.samples[quarter : 2 * quarter], report.samples[-quarter:]
    before, after = (statistics.median(each.memory for each in part) for part in (second, last))
    lost: list[str] = []
    if after > GROWTH * before:
        lost.append(f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
    idle = report.samples[0].threads + 5
    if report.after.threads > idle or report.after.descriptors > 32:
        lost.append(f"{report.after.threads} threads and {report.after.descriptors} descriptors are left")
    return lost


def end_by(number: signal.Signals, model: Path, folder: Path) -> tuple[str, str]:
    """Send a signal while an answer is streamed. Return how the server ended, and what was wrong or ""."""
    folder.mkdir()
    temporary = folder / "tmp"
    temporary.mkdir()
    with serving(model, folder / "log", temporary) as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            connection.sendall(LONG)
            body = connection.recv(65536)  # the answer has begun
            server.process.send_signal(number)
            try:
                while part := connection.recv(65536):
                    body += part
            except OSError:
                pass
        code, whole = server.process.wait(180), b'"finish_reason":"' in body
        traces = server.log.read_text(encoding="utf-8").count("Traceback")
    left = sorted(path.name for path in temporary.iterdir())
    told = f"exit {code}, the answer {'whole' if whole else 'cut off'}, {len(left)} temporary files"
    killed = number == signal.SIGKILL
    good = code == (-number if killed else 130) and (killed or whole) and not left and not traces
    return told, "" if good else f"{number.name}: {told}, {traces} traces {left[:3]}"


def soak(model: Path, report: Report, folder: Path, signals: int, jobs: int) -> Report:
    """Attack a server, then end others by signals, each so many times and so many of them at once."""
    if report.seconds > 0:
        with serving(model, folder / "attack.log") as server:
            attack(server, report)
    with ThreadPoolExecutor(jobs) as pool:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            ended = [pool.submit(end_by, number, model, folder / f"{number.name}-{each}") for each in range(signals)]
            ends = Counter(each.result()[0] for each in ended)
            report.lost += [each.result()[1] for each in ended if each.result()[1]]
            report.signals[number.name] = "; ".join(f"{count} x {end}" for end, count in ends.items())
    return report


def compiled_twin(folder: Path) -> Path:
    """Compile a tiny model into the folder."""
    from ktc.model import twin

    out = folder / "soak_twin"
    compile_it = ["compile", str(twin.write("deepseek_v2", folder)), "moe-lora", "-o", str(out), "-q"]
    subprocess.run([sys.executable, "-m", "ktc", *compile_it], check=True)
    return out


def told(report: Report) -> str:
    """Return the report for people: Markdown."""
    width = max(map(len, report.outcomes), default=0)
    lines = [
        f"{report.seconds:g} s, {report.clients} clients, seed {report.seed}",
        "",
        f"| {'requests':{width}} |   count |",
        f"| {'-' * width} | ------: |",
        *(f"| {name:{width}} | {count:7,} |" for name, count in sorted(report.outcomes.items())),
        "",
    ]
    quarter = len(report.samples) // 4
    for name, part in (("second", report.samples[quarter : 2 * quarter]), ("last", report.samples[-quarter:])):
        if quarter and part:
            memory, descriptors, threads = (
                statistics.median(getattr(each, of) for each in part) for of in ("memory", "descriptors", "threads")
            )
            lines.append(f"{name} quarter: {memory / 2**20:.0f} MiB, {descriptors:g} descriptors, {threads:g} threads")
    if report.after is not None:
        memory, descriptors, threads = report.after.memory, report.after.descriptors, report.after.threads
        lines.append(f"afterwards: {memory / 2**20:.0f} MiB, {descriptors} descriptors, {threads} threads")
    lines += [f"{name} mid-stream: {ended}" for name, ended in report.signals.items()]
    lines += ["", "nothing was lost" if not report.lost else "LOST:", *(f"  {each}" for each in report.lost)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seconds", nargs="?", type=float, default=600.0, help="of the attack; 0: only signals")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--signals", type=int, default=1, help="servers that each signal ends")
    parser.add_argument("--jobs", type=int, default=1, help="servers that are ended at a time")
    parser.add_argument("--model", type=Path, help="a compiled model; default: a tiny one is compiled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", type=Path, help="write the report as JSON too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        model = asked.model or compiled_twin(folder)
        report = soak(model, Report(asked.seconds, asked.clients, asked.seed), folder, asked.signals, asked.jobs)
    text = json.dumps(asdict(report), indent=1)
    if asked.o is not None:
        asked.o.write_text(text + "\n", encoding="utf-8")
    print(text if asked.json else told(report))
    return 1 if report.lost else 0


if __name__ == "__main__":
    sys.exit(main())
