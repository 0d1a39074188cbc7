"""Where the engine of `ktc serve` spends processor time: clients in a closed loop, without HTTP.

OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/serving_engine.py build/olmoe4_served 64 50

In: OUT, the number of clients, and seconds of processor time. Requests are those of `ktc bench serve --new-tokens
64-192`. On one CPU all kernels run on one thread, so the parts are the whole.
"""

from __future__ import annotations

import copy
import queue
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktc.generate.language_model import open_language_model
from ktc.serving import batch, engine, reading
from ktc.serving.decoder import Decoder
from ktc.serving.request import Limits, Request

_PARTS = [
    ("steps", batch.RowBatch, "step"), ("reading prompts", reading.Reading, "advance"), ("choice of tokens", engine,
    "choose"), ("joining rows", batch.RowBatch, "join"), ("preparing requests", engine, "Generation"),
    ("prefix cache", engine.PrefixCache, "length"), ("prefix cache", engine.PrefixCache, "find"),
    ("prefix cache", engine.PrefixCache, "add"),
]  # fmt: skip
_EACH = 5.0  # seconds of processor time between two lines


def timed(spent: Counter[str], part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        begun = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            spent[part] += time.thread_time() - begun

    return counted


def run(out: Path, clients: int, seconds: float) -> None:
    spent, ended, tokens, chance = Counter[str](), queue.Queue[str](), [0], random.Random(7)
    for part, owner, name in _PARTS:
        setattr(owner, name, timed(spent, part, getattr(owner, name)))
    model = open_language_model(out).model

    def emit(events: Any) -> None:
        tokens[0] += sum(len(event.tokens) for event in events)
        for event in events:
            if event.end is not None:
                ended.put(event.name)

    def request(number: int) -> Request:
        config = copy.deepcopy(model.generation_config)
        if number % 2:
            config.update(do_sample=True, temperature=0.8, top_k=0)
        prompt = tuple(chance.randrange(model.config.vocab_size) for _ in range(chance.randint(16, 128)))
        return Request(f"{number}", prompt, chance.randint(64, 192), config, number)

    serving = engine.Engine(Decoder(model), Limits(clients, cache_bytes=6 << 30, prefix_bytes=2 << 30), emit)
    serving.start()
    sent, begun, before = clients, time.process_time(), (0.0, 0)
    for number in range(clients):
        serving.submit(request(number))
    while (now := time.process_time() - begun) < seconds:
        if now - before[0] >= _EACH:
            print(f"{now:6.1f} s  {(tokens[0] - before[1]) / (now - before[0]):6.1f} tokens per CPU second", flush=True)
            before = now, tokens[0]
        try:
            ended.get(timeout=0.2)
        except queue.Empty:
            continue
        serving.submit(request(sent))
        sent += 1
    print(f"{clients} clients, {sent} requests: {tokens[0] / now:.1f} tokens per CPU second")
    for part, of in spent.most_common():
        print(f"  {part:20} {of:6.2f} s  {of / now:6.1%}")
    serving.stop()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
