"""Decoding on a GPU beside llama.cpp's `llama-bench`, on one GGUF file of a real model's sizes with random weights.

    python benchmarks/gpu_beside_llama.py --llama-bench build/llama-cuda/bin/llama-bench [--budget 8GB,all] \
        [--model gpt_oss_20b] [--format mxfp4] [--layers N] [--context 64,4096] [--folder DIR]

For each budget of GPU memory both decode one sequence: ktc by `moe-inference` with that budget in `plan`, llama.cpp by
`-ngl 99 --n-cpu-moe N` with the least N whose weights, cache and buffers fit. `all`: every expert on the GPU. Memory
is what the GPU has less at the worst moment, by the driver, a CUDA context included. This process, which is ktc, has
one before, so the bytes of another process' context are added. Neither runs while the other does. Without a GPU, both
compute on the CPU, for a check of this file.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from ktc import compiler
from ktc.foundation import host
from ktc.foundation.host_file import parse_bytes
from ktc.model.loading.load import load
from ktc.tools.bench import generate
from ktc.tools.bench.decode.model_file import FILE, FileTensor, config_of, tensors_of, write_model
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.requests import FILE_FORMATS, Generate
from ktc.tools.bench.sizes import SIZES
from ktc.tools.measure.limits import Limits, build_library

RULES: Final = Path(__file__).parents[1] / "rules" / "moe-inference.ktr"
_BUFFERS: Final = 1_000_000_000  # of llama.cpp's cache, its graphs and CUDA's context
_ALL: Final = "all"
_QUIET: Final = ProgressSink(lambda stage, facts: None, lambda part, done, total: None, lambda part: None)
_ROOM: Final = "100GB"  # a budget that keeps every expert


@dataclass
class Peak:
    """The most memory that was taken on the GPU, in bytes."""

    used: int = 0


@contextmanager
def watched() -> Generator[Peak]:
    """Watch the memory of the GPU during the block."""
    peak, ended = Peak(), threading.Event()
    if not torch.cuda.is_available():
        yield peak
        return
    before = torch.cuda.mem_get_info()[0]

    def watch() -> None:
        while not ended.wait(0.02):
            peak.used = max(peak.used, before - torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def context_bytes() -> int:
    """Return what the GPU has less while another process has a CUDA context, 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    script = "import torch; torch.cuda.init(); torch.cuda.synchronize(); print(flush=True); input()"
    before = torch.cuda.mem_get_info()[0]
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "a pipe"
        process.stdout.readline()
        taken = before - torch.cuda.mem_get_info()[0]
        process.communicate(b"\n")
    return taken


def layers_on_cpu(tensors: Sequence[FileTensor], budget: int) -> int:
    """Return the least N of `--n-cpu-moe` by which the weights on the GPU and llama.cpp's buffers fit `budget`."""
    on_gpu = sum(tensor.nbytes for tensor in tensors if not tensor.name.startswith("token_embd")) + _BUFFERS
    layers = 1 + max(int(tensor.name.split(".")[1]) for tensor in tensors if tensor.name.startswith("blk."))
    for count in range(layers):
        if on_gpu <= budget:
            return count
        on_gpu -= sum(t.nbytes for t in tensors if t.name.startswith(f"blk.{count}.") and "_exps." in t.name)
    print(
        f"  llama.cpp does not fit {budget / 1e9:.1f} GB: {on_gpu / 1e9:.1f} GB with all experts on the CPU", flush=True
    )
    return layers


def llama_rates(options: argparse.Namespace, file: Path, on_cpu: int) -> tuple[dict[int, float], int]:
    """Return llama.cpp's token/s by context, and its GPU memory."""
    words = ["-m", file, "-ngl", 99, "-ncmoe", on_cpu, "-p", 0, "-n", options.steps, "-r", 3, "-o", "json"]
    words += ["-t", options.threads, "-d", ",".join(map(str, options.context))]
    with watched() as peak:
        done = subprocess.run(
            [options.llama_bench, *map(str, words)], capture_output=True, text=True, timeout=options.timeout
        )
    if done.returncode != 0:
        raise SystemExit(f"llama-bench ended with {done.returncode}: {done.stderr[-800:]}")
    rows = json.loads(done.stdout)
    print(f"  llama.cpp {rows[0]['build_commit']}, {rows[0]['gpu_info'] or 'no GPU'}, -ncmoe {on_cpu}", flush=True)
    rates = {row["n_depth"]: statistics.median(row["samples_ts"]) for row in rows}
    print(f"  {rates} token/s in {peak.used / 1e9:.1f} GB", flush=True)
    return rates, peak.used


def ktc_rates(options: argparse.Namespace, folder: Path, work: Path, budget: str) -> tuple[dict[int, float], int]:
    """Return ktc's token/s by context, of the median step, and its GPU memory."""
    settings = {}
    rule = work / "budget.ktr"
    text = RULES.read_text()
    if torch.cuda.is_available():
        settings = {"device": "cuda:0", "prefill": "cuda:0"}
        text = text.replace("plan {", f"plan {{\n  cuda:0 = {_ROOM if budget == _ALL else budget}", 1)
    rule.write_text(text)
    began = time.perf_counter()
    out = work / ("out_" + "".join(c if c.isalnum() else "_" for c in budget))
    with watched() as peak:
        compiler.compile(folder, rule, out, settings=settings)
        compiled = time.perf_counter()
        model: Any = load(out)
        print(
            f"  ktc: compiled in {compiled - began:.0f} s, loaded in {time.perf_counter() - compiled:.0f} s", flush=True
        )
        request = Generate(contexts=tuple(options.context), steps=options.steps, settings=settings)
        limits = Limits(build_library(host.detect().isas[0], work), options.threads)
        rates = dict[int, float]()
        for row in generate.rows("ktc", model, request, limits, _QUIET):
            print(f"  {row}", flush=True)
            if isinstance(row, generate.Row):
                rates[row.context] = row.tokens_per_second
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rates, peak.used + options.context_bytes


def measure(options: argparse.Namespace, folder: Path, work: Path) -> None:
    """Print a line for each budget and context."""
    config = config_of(SIZES[options.model], options.layers)
    tensors = tensors_of(config, SIZES[options.model].architecture, options.format)
    peers = dict[str, tuple[dict[int, float], int]]()
    for budget in options.budget:
        on_cpu = 0 if budget == _ALL else layers_on_cpu(tensors, parse_bytes(budget) or 0)
        peers[budget] = llama_rates(options, folder / FILE, on_cpu)
    for budget, (theirs, their_bytes) in peers.items():
        ours, our_bytes = ktc_rates(options, folder, work, budget)
        for context, rate in ours.items():
            print(
                f"{budget}, context {context}: ktc {rate:.1f} token/s in {our_bytes / 1e9:.1f} GB, llama.cpp"
                f" {theirs[context]:.1f} in {their_bytes / 1e9:.1f} GB, ktc is {rate / theirs[context]:.2f}x as fast",
                flush=True,
            )


def budgets(text: str) -> list[str]:
    """Return the budgets of an option. Raises ArgumentTypeError for one that is no size."""
    words = text.split(",")
    for word in words:
        if word != _ALL and parse_bytes(word) is None:
            raise argparse.ArgumentTypeError(f"`{word}` is no size as 8GB or 12GiB, and not `{_ALL}`")
    return words


def main() -> None:
    """Write the model, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--model", choices=SIZES, default="gpt_oss_20b")
    parser.add_argument("--format", choices=FILE_FORMATS, default="mxfp4")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--budget", type=budgets, default=["8GB", _ALL])
    parser.add_argument("--context", type=lambda text: [int(word) for word in text.split(",")], default=[64, 4096])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=host.usable_threads())
    parser.add_argument("--timeout", type=float, default=120, help="seconds for llama-bench")
    parser.add_argument("--folder", type=Path, help="where the model is written and kept")
    options = parser.parse_args()
    options.context_bytes = context_bytes()
    with TemporaryDirectory(prefix="ktc-llama-") as temporary:
        work = Path(temporary)
        began = time.perf_counter()
        folder = write_model(options.model, options.layers, options.format, options.folder or work / "model")
        size = (folder / FILE).stat().st_size
        print(
            f"{options.model}, {options.format}: {size / 1e9:.1f} GB in {time.perf_counter() - began:.0f} s", flush=True
        )
        measure(options, folder, work)


if __name__ == "__main__":
    main()
