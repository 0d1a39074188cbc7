"""Where the engine of `ktc serve` spends processor time: clients in a closed loop, without HTTP.

OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/serving_engine.py build/olmoe4_served 64 50 [--system 2048]

In: OUT, the number of clients, and seconds of processor time. Requests are those of `ktc bench serve --new-tokens
64-192`; with `--system` all prompts begin with the same tokens, this many, which the first request reads before the
others come. On one CPU all kernels run on one thread, so the parts are the whole.
"""

from __future__ import annotations

import argparse
import copy
import queue
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktc.inference.generate.language_model import open_language_model
from ktc.inference.serving import batch, prefill, worker
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.request import Limits, Request

_PARTS = [
    ("steps", batch.RowBatch, "step"), ("prefill", prefill.PrefillBatch, "advance"), ("choice of tokens", worker.Choice,
    "begin"), ("joining rows", batch.RowBatch, "join"), ("preparing requests", worker, "Generation"),
    ("prefix cache", worker.PrefixCache, "length"), ("prefix cache", worker.PrefixCache, "find"),
    ("prefix cache", worker.PrefixCache, "add"), ("scheduling", worker.Scheduler, "_admit"),
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


def run(out: Path, clients: int, seconds: float, system: int) -> None:
    spent, ended, tokens, chance = Counter[str](), queue.Queue[str](), [0], random.Random(7)
    for part, owner, name in _PARTS:
        setattr(owner, name, timed(spent, part, getattr(owner, name)))
    model = open_language_model(out).model
    beginning = tuple(chance.randrange(model.config.vocab_size) for _ in range(system))
    most = Counter[str]()

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
        return Request(f"{number}", beginning + prompt, chance.randint(64, 192), config, number)

    serving = Engine(ModelRunner(model), Limits(clients, cache_bytes=6 << 30, prefix_bytes=2 << 30), emit)
    serving.start()
    if beginning:
        serving.submit(Request("first", beginning, 1, model.generation_config))
        ended.get()
        tokens[0] = 0
        spent.clear()
    sent, begun, before = clients, time.process_time(), (0.0, 0)
    for number in range(clients):
        serving.submit(request(number))
    while (now := time.process_time() - begun) < seconds:
        if now - before[0] >= _EACH:
            print(f"{now:6.1f} s  {(tokens[0] - before[1]) / (now - before[0]):6.1f} tokens per CPU second", flush=True)
            before = now, tokens[0]
        held = {"running requests": serving.cache_bytes, "kept prompts": serving.prefix_bytes}
        most |= Counter(held | {"both": sum(held.values())})
        try:
            ended.get(timeout=0.2)
        except queue.Empty:
            continue
        serving.submit(request(sent))
        sent += 1
    print(f"{clients} clients, {sent} requests: {tokens[0] / now:.1f} tokens per CPU second")
    for part, of in spent.most_common():
        print(f"  {part:20} {of:6.2f} s  {of / now:6.1%}")
    print("most memory of " + ", ".join(f"{name}: {of / 1e6:,.0f} MB" for name, of in most.items()))
    serving.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("clients", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--system", type=int, default=0, help="tokens that all prompts begin with")
    given = parser.parse_args()
    run(given.out, given.clients, given.seconds, given.system)
