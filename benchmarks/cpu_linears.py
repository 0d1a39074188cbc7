"""Frozen linear layers on the CPU: products of DeepSeek-V2-Lite's sizes, and a training step of its layers.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/cpu_linears.py [--layers 2] [--rounds 3] [--length 512]

Two tables. The first has GFLOP/s of forward with the gradient of the input, for attention's projections and 512 to
2,048 rows: torch in bf16, torch in fp32 on weights that are cast for every call or kept, and ktc's product. The
second trains random bf16 weights compiled by `moe-lora` and `LINEARS` with KTrainer (rank 8, bf16 autocast, 2
micro-batches), with torch's product and with `packed`, in turn, on one load. The vocabulary is cut to 8,192 tokens:
the head takes torch's product in both. Medians of the rounds, in seconds of processor time, which other programs
change little: use one thread.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from peft import get_peft_model
from torch import Tensor
from torch.nn import functional
from transformers import TrainingArguments

import ktc
from ktc.model.linears.lora_linear import KTLinear
from ktc.model.linears.many_rows import ManyRows
from ktc.model.loading import peft_glue
from ktc.training import KTrainer

CONFIG: Final = Path(__file__).parent.parent / "tests" / "configs" / "deepseek-v2-lite"
PROGRAMS: Final = Path(__file__).parent.parent / "rules"
LINEARS: Final = """
rule linears {
  match linear at "model.layers.0.mlp.*", "**.shared_experts.*"
  => kt_linear(torch, prefill = auto)
}
"""
PROJECTIONS: Final = {"q": (3072, 2048), "kv_a": (576, 2048), "kv_b": (4096, 512), "o": (2048, 2048)}
ROWS: Final = (512, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 2), ("rounds", 3), ("length", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ktc-cpu-linears-"))
    try:
        _run(folder, options)
    finally:
        shutil.rmtree(folder)


def _run(folder: Path, options: argparse.Namespace) -> None:
    model = folder / "model"
    model.mkdir()
    settings = json.loads((CONFIG / "config.json").read_text()) | {
        "num_hidden_layers": options.layers,
        "vocab_size": 8192,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (model / "config.json").write_text(json.dumps(settings))
    rules = folder / "rules.ktr"
    rules.write_text((PROGRAMS / "moe-lora.ktr").read_text() + LINEARS)
    ktc.compile(model, rules, folder / "v2lite_tuned", settings={"device": "cpu"}, random_weights=True)
    base = ktc.load(folder / "v2lite_tuned", random_weights=0)
    layers = [module for module in base.modules() if isinstance(module, KTLinear)]
    product = next(layer.many for layer in layers if layer.many is not None)
    print(f"{torch.get_num_threads()} threads of torch; chosen: {product.description()}", flush=True)
    _products(product, options.rounds)
    tuned = get_peft_model(base, peft_glue.read_lora_config(folder / "v2lite_tuned"))
    times: dict[str, list[float]] = {"torch": [], "packed": []}
    for number in range(1 + options.rounds):
        for name, found in times.items():
            for layer in layers:
                layer.many = None if name == "torch" else ManyRows(product.kernel, product.threads, "packed")
            seconds, loss = _train(tuned, folder / name, options.length)
            found += [seconds] * (number > 0)  # the first round warms up
            print(f"round {number}, {name}: {seconds:.2f} s, loss {loss:.4f}", flush=True)
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(f"step: torch {medians['torch']:.2f} s, packed {medians['packed']:.2f} s", end=", ")
    print(f"{medians['torch'] / medians['packed']:.2f}x as fast")


def _products(product: ManyRows, rounds: int) -> None:
    print("projection rows | GFLOP/s: torch bf16, fp32 cast, fp32 kept, ktc", flush=True)
    for name, (outputs, inputs) in PROJECTIONS.items():
        for rows in ROWS:
            candidates = _candidates(product, rows, outputs, inputs)
            times = [[_seconds(each) for each in candidates] for _ in range(1 + rounds)][1:]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            speeds = [4e-9 * rows * outputs * inputs / each for each in medians]
            print(f"{name:4s} {rows:5d} | " + " ".join(f"{speed:5.0f}" for speed in speeds), flush=True)


def _candidates(product: ManyRows, rows: int, outputs: int, inputs: int) -> tuple[Callable[[], object], ...]:
    x, grad = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, outputs).bfloat16()
    weight = torch.randn(outputs, inputs).bfloat16()
    kept = weight.float()
    return (
        lambda: (functional.linear(x, weight), grad @ weight),
        lambda: _in_fp32(x, grad, weight.float()),
        lambda: _in_fp32(x, grad, kept),
        lambda: (product.multiply(x, weight), product.multiply(grad, weight, transposed=True)),
    )


def _in_fp32(x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (x.float() @ weight.T).bfloat16(), (grad.float() @ weight).bfloat16()


def _seconds(compute: Callable[[], object]) -> float:
    began = time.process_time()
    compute()
    return time.process_time() - began


def _train(model: Any, folder: Path, length: int) -> tuple[float, float]:
    """Return the processor time of a step and its loss."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (2, length), generator=generator)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = KTrainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    began = time.process_time()
    loss = trainer.train().training_loss
    return time.process_time() - began, loss


if __name__ == "__main__":
    main()
