"""`ktc serve` beside `generate` with the same loaded model: token/s of one sequence, and of clients of the server.

python benchmarks/serving_beside_generate.py tests/configs/deepseek-v2-lite --layers 8 --set experts=auto

The weights are random, and a token is a word. Clients are those of `serving_clients.py`. Those of `--by-step` come
after the others, while each step begins only when the host has the tokens of the one before.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from ktc import compiler
from ktc.cli.compiling import settings_of
from ktc.foundation.files import temporary_folder
from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.serving import server as serve
from ktc.inference.serving.models import ServedModel, ServedModels
from ktc.inference.serving.request import Limits
from ktc.model.loading.load import load
from ktc.tools.bench.stack import stack_of

_PROMPT, _NEW = (16, 128), (64, 192)  # tokens, as of the clients
_REQUESTS = 16
_PAUSE = 0.008  # seconds


class _Clock(BaseStreamer):
    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Any) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: Any, pause: float = 0.0) -> None:
    """Print what `generate` takes for such requests as a client has, one after the other, with pauses between them."""
    device, chance = model.get_input_embeddings().weight.device, random.Random(1)
    steps, prompts, tokens, took = (list[float](), list[float]()), list[float](), 0, 0.0
    for number in range(-2, _REQUESTS):
        ids = torch.randint(3, 1000, (1, chance.randint(*_PROMPT))).to(device)
        new, draws = chance.randint(*_NEW), bool(number % 2)
        given: dict[str, Any] = {"temperature": 0.8} if draws else {}
        time.sleep(pause)
        clock, begun = _Clock(), time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, max_new_tokens=new,
            do_sample=draws, streamer=clock, **given,
        )  # fmt: skip
        if number >= 0:
            tokens, took = tokens + new, took + time.perf_counter() - begun
            prompts.append(clock.at[1] - begun)
            steps[draws].append(statistics.median(after - before for before, after in itertools.pairwise(clock.at[1:])))
    greedy, drawn, prompt = (1e3 * statistics.median(values) for values in (*steps, prompts))
    print(
        f"generate, pauses of {1e3 * pause:.0f} ms: a step {greedy:.2f} ms, drawn {drawn:.2f}; a prompt {prompt:.0f} "
        f"ms; {tokens / took:.0f} token/s", flush=True,
    )  # fmt: skip


def opened(source: str, layers: int | None, rules: str, settings: Sequence[str]) -> LanguageModel:
    """Return the first layers of a model with random weights, and a tokenizer of words."""
    with temporary_folder("ktc-serving-") as folder:
        stack, out = stack_of(source, layers, folder / "first_layers"), folder / "served"
        compiler.compile(stack.model, rules, out, settings=settings_of(list(settings)), random_weights=True)
        model: Any = load(out, random_weights=0)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    return LanguageModel(model.eval(), fast, Path(source).name, "", model.config.max_position_embeddings, None)


def run(language: LanguageModel, clients: str, by_step: str, seconds: float) -> None:
    """Print the rates."""
    model: Any = language.model
    generate(model)
    generate(model, _PAUSE)
    free = serve.free_memory(model)
    limits = Limits(cache_bytes=free // 2, prefill_chunk=serve.default_chunk(model), prefix_bytes=free // 8)
    begun = time.perf_counter()
    with serve.listen("127.0.0.1", 0) as listening:
        server, _ = serve.make_server(ServedModels({language.name: ServedModel(language, "")}, ()), limits)
        print(f"the server is ready after {time.perf_counter() - begun:.0f} s", flush=True)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        program = str(Path(__file__).with_name("serving_clients.py"))
        asked = [sys.executable, program, serve.url(listening), "--seconds", str(seconds), "--clients"]
        graphs = getattr(model, "decode_graphs", None)
        subprocess.run([*asked, clients], check=True)
        if by_step and graphs is not None:
            graphs.recorder = replace(graphs.recorder, ahead=False)
            print("step by step:", flush=True)
            subprocess.run([*asked, by_step], check=True)
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with config.json")
    parser.add_argument("--layers", type=int, help="the first layers; all where it is missing")
    parser.add_argument("--rules", default="moe-inference")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--by-step", default="", metavar="CLIENTS", help="numbers of clients, as those of `--clients`")
    options = parser.parse_args()
    loaded = opened(options.model, options.layers, options.rules, options.settings)
    run(loaded, options.clients, options.by_step, options.seconds)
