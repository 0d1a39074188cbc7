"""Every weight format of the experts' kernels beside stock transformers on the same weights.

    OMP_NUM_THREADS=1 python benchmarks/format_consistency.py [--formats bf16 q4_k] [--layers 2] [--keep FOLDER]

Makes a Qwen3-MoE of Qwen3-30B-A3B's widths (hidden 2048, expert 768, 32 query and 4 key heads of 128, 8 experts per
token) with 2 layers, 16 experts, 4,096 tokens of vocabulary and random weights. bf16, fp16, int8, fp8 and int4 are made
of a bf16 checkpoint by `--set format=`; the others are GGUF files of random blocks, attention and head too. Each is
compiled with `moe-inference` and measured by `ktc consistency --against stock`: stock has the dequantised weights, in
bf16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from ktc import compiler
from ktc.inference.consistency.report import Report
from ktc.inference.consistency.request import Model, Request
from ktc.inference.consistency.run import measure
from ktc.inference.consistency.scores import Difference
from ktc.tools.bench.decode.model_file import config_of, write_sizes
from ktc.tools.bench.sizes import SIZES, Sizes

MADE: Final = ("bf16", "fp16", "int8", "fp8", "int4")  # of the bf16 checkpoint
FILES: Final = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "mxfp4")
_HEAD: Final = (
    "| format | calls, mean | decode, mean | decode, p99 | > 0.1 | same token | stock's own, mean |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=(*MADE, *FILES), default=(*MADE, *FILES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="make the models in this folder, and leave them there")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="ktc-formats-") as temporary:
        folder = options.keep or Path(temporary)
        print("\n".join(_HEAD), flush=True)
        for name in options.formats:
            print(line(name, measured(name, options.layers, folder)), flush=True)


def sizes() -> Sizes:
    """Return Qwen3-30B-A3B's widths with fewer experts and a smaller vocabulary."""
    real = SIZES["qwen3_30b"]
    smaller: Mapping[str, Any] = {**real.config, "num_experts": 16, "vocab_size": 4096}
    return Sizes(real.model_type, real.architecture, smaller)


def measured(name: str, layers: int, folder: Path) -> Report:
    """Compile the model in a format, and compare it with stock."""
    checkpoint = folder / ("checkpoint" if name in MADE else f"file_{name}")
    if not (checkpoint / "config.json").is_file():
        if name in MADE:
            write_checkpoint(layers, checkpoint)
        else:
            write_sizes(sizes(), layers, name, checkpoint)
    out = folder / f"out_{name}"
    if not (out / "ktc.json").is_file():
        settings = {"format": name} if name in MADE else {}
        compiler.compile(str(checkpoint), "moe-inference", out, settings=settings)
    model = (Model(name, out),)
    return measure(Request(model, model, against="stock"), lambda what: print(what, file=sys.stderr))


def write_checkpoint(layers: int, folder: Path) -> None:
    """Write a bf16 checkpoint of random weights of 0.02."""
    torch.manual_seed(0)
    config = config_of(sizes(), layers)
    model: Any = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    model.save_pretrained(folder)


def line(name: str, report: Report) -> str:
    """Return a row of the table."""
    paths, own = report.cells[0].paths, report.stock_rounding[name]
    calls, decode = paths["calls"], paths["decode"]
    cells = (_mean(calls), _mean(decode), _value(decode.p99), f"{decode.above:.2%}", f"{decode.agreement:.1%}")
    return f"| {name} | {' | '.join(cells)} | {_mean(own)} |"


def _mean(found: Difference) -> str:
    return _value(found.mean)


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    main()
