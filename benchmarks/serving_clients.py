"""Token/s and waiting times of a running server, for several numbers of clients that send one request after the other.

ktc serve build/olmoe4_served --port 8000 &
python benchmarks/serving_clients.py http://127.0.0.1:8000/v1 --clients 1,4,16,64 --seconds 10

Half of the clients stream, the first among them; half of the requests are drawn. Clients are in four processes, and
read bytes alone, so that they do not measure themselves. With `--long` one more client sends long prompts meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import time
from typing import Any
from urllib.parse import urlsplit

_PROCESSES = 4
_NEW = (64, 192)  # tokens of an answer
_PROMPT = (16, 128)  # words


async def _answer(url: str, body: dict[str, Any]) -> list[float]:
    """Return the times at which pieces of an answer came; of one that is not streamed, when it ended."""
    at, times = urlsplit(url), list[float]()
    reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 24)
    payload = json.dumps(body).encode()
    head = f"POST {at.path}/completions HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    status = await reader.readline()
    assert b" 200 " in status, status + await reader.read(2000)
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"text":""' not in line and b'"text": ""' not in line:
            times.append(time.perf_counter())
    writer.close()
    return times or [time.perf_counter()]


async def _client(url: str, model: str, number: int, end: float, prompt: tuple[int, int]) -> list[dict[str, Any]]:
    chance, found = random.Random(number), list[dict[str, Any]]()
    while time.perf_counter() < end or not found:
        wanted, streams = chance.randint(*_NEW), number % 2 == 0
        words = " ".join(f"w{chance.randrange(10_000)}" for _ in range(chance.randint(*prompt)))
        body = {"model": model, "prompt": words, "max_tokens": wanted, "temperature": 0, "stream": streams}
        if chance.random() < 0.5:
            body |= {"temperature": 0.8, "seed": chance.randrange(1 << 30)}
        begun = time.perf_counter()
        times = await _answer(url, body)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        found.append({"tokens": wanted, "first": times[0] - begun if streams else None, "gaps": gaps})
    return found


def _clients(url: str, model: str, numbers: list[int], seconds: float, long: int) -> list[dict[str, Any]]:
    async def all_of_them() -> list[dict[str, Any]]:
        end = time.perf_counter() + seconds
        runs = [_client(url, model, number, end, _PROMPT) for number in numbers]
        if long:
            asyncio.get_running_loop().create_task(_client(url, model, -1, end, (long, long)))
        return [outcome for found in await asyncio.gather(*runs) for outcome in found]

    return asyncio.run(all_of_them())


def measure(url: str, model: str, clients: int, seconds: float, long: int) -> None:
    """Print a row."""
    shares = [share for at in range(_PROCESSES) if (share := list(range(at, clients, _PROCESSES)))]
    begun = time.perf_counter()
    with multiprocessing.Pool(len(shares)) as pool:
        given = [(url, model, share, seconds, long if not at else 0) for at, share in enumerate(shares)]
        outcomes = [outcome for found in pool.starmap(_clients, given) for outcome in found]
    took = time.perf_counter() - begun
    firsts = [outcome["first"] for outcome in outcomes if outcome["first"] is not None]
    gaps = [gap for outcome in outcomes for gap in outcome["gaps"]]
    rate = sum(outcome["tokens"] for outcome in outcomes) / took
    waits = " ".join(f"{name} {_of(values)}" for name, values in (("first", firsts), ("next", gaps)))
    print(f"{clients:3} clients: {rate:8.1f} token/s, {len(outcomes)} answers in {took:.1f} s, {waits}", flush=True)


def _of(values: list[float]) -> str:
    """Return p50, p95 and the most, in ms."""
    ordered = sorted(values) or [0.0]
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return f"{1e3 * statistics.median(ordered):.2f} / {1e3 * p95:.2f} / {1e3 * ordered[-1]:.1f} ms"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="", help="the model's name; asked for where it is missing")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--long", type=int, default=0, help="words of the prompts of one more client")
    asked = parser.parse_args()
    name = asked.model
    if not name:
        import urllib.request

        with urllib.request.urlopen(f"{asked.url}/models") as reply:
            name = json.load(reply)["data"][0]["id"]
    print("p50 / p95 / most of the first token and of the time between two:")
    for clients in map(int, asked.clients.split(",")):
        measure(asked.url, name, clients, asked.seconds, asked.long)
