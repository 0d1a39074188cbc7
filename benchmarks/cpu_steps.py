"""Whole training steps on the CPU beside stock: forward, backward and AdamW of LoRA on the first layers of a model.

    OMP_NUM_THREADS=2 python benchmarks/cpu_steps.py v2-lite [--rule moe-experts-lora] [--format int4] [--rounds 5]

A step of `--accumulation` sequences is computed in turn by KTrainer and by stock transformers and PEFT, with micro-
batches of one sequence and as one batch, all under autocast to bf16 and with the same adapter, without dropout. Weights
are random and bf16; `--format` is that of ktc's experts. The vocabulary is cut with the layers, so that the head has
the share of the step that it has at full depth. One line of JSON: seconds and seconds of processor time, medians of the
rounds, and for each kind of stock step the median of the ratios within a round. The first round does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from peers.stock import stock_model
from peft import get_peft_model
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import ktc
from ktc.model import twin
from ktc.model.loading.peft_glue import read_lora_config
from ktc.tools.bench.stack import stack_of
from ktc.training import KTrainer
from ktc.training.trainers.report import report_of

CONFIGS: Final = Path(__file__).parent.parent / "tests" / "configs"
LAYERS: Final[Mapping[str, int]] = {"v2-lite": 3, "qwen3.5": 2}  # one dense of three; one of two is recurrent
CUT: Final = 128  # a vocabulary is a multiple of it


def config_of(shape: str, layers: int) -> dict[str, Any]:
    """Return the config of the first `layers`, with their share of the vocabulary."""
    if shape == "qwen3.5":
        whole: dict[str, Any] = twin.default_config("qwen3_5_moe").to_dict()
        whole["layer_types"] = ["linear_attention", "full_attention"] * (whole["num_hidden_layers"] // 2)
    else:
        whole = json.loads((CONFIGS / "deepseek-v2-lite" / "config.json").read_text(encoding="utf-8"))
    share = layers / whole["num_hidden_layers"]
    words = max(CUT, round(whole["vocab_size"] * share / CUT) * CUT)
    return twin.first_layers(whole, layers) | {"vocab_size": words, "bos_token_id": 0, "eos_token_id": 1}


class Turns(TrainerCallback):
    """Times the trainer's steps, and runs each stock step after each of them."""

    def __init__(self, stock: Mapping[str, Callable[[], None]]) -> None:
        self._stock, self._began = stock, (0.0, 0.0)
        self.wall: dict[str, list[float]] = {name: [] for name in ("ktc", *stock)}
        self.processor: dict[str, list[float]] = {name: [] for name in ("ktc", *stock)}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._took("ktc")
        for name, step in self._stock.items():
            self.on_step_begin()
            step()
            self._took(name)

    def _took(self, name: str) -> None:
        wall, processor = self._began
        self.wall[name].append(time.perf_counter() - wall)
        self.processor[name].append(time.process_time() - processor)


def stock_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, batch: int) -> None:
    """Compute a step of the sequences of `ids`, `batch` at a time."""
    passes = len(ids) // batch
    for rows in ids.view(passes, batch, -1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss / passes
        loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the times of all kinds of steps."""
    layers = options.layers or LAYERS[options.shape]
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_of(options.shape, layers)), encoding="utf-8")
    out = ktc.compile(
        model, options.rule, folder / "tuned", settings={"device": "cpu", "format": options.format}, random_weights=True
    )
    lora = read_lora_config(out)
    lora.lora_dropout = 0.0
    tuned: Any = get_peft_model(ktc.load(out, random_weights=0), lora)
    untuned = stock_model(stack_of(str(model), None, folder), "cpu", 0, lambda *_: None)
    stock: Any = get_peft_model(untuned, lora).train()
    steps = options.rounds + 1
    ids = torch.randint(2, tuned.config.vocab_size, (steps * options.accumulation, options.length))
    optimizer = torch.optim.AdamW([p for p in stock.parameters() if p.requires_grad], 1e-4)
    turns = Turns(
        {
            f"stock, {options.accumulation // batch} x {batch}": lambda batch=batch: stock_step(
                stock, optimizer, ids[: options.accumulation], batch
            )
            for batch in dict.fromkeys((1, options.accumulation))
        }
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "run"), max_steps=steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=options.accumulation, learning_rate=1e-4, bf16=True, use_cpu=True,
        logging_strategy="no", report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    trainer = KTrainer(model=tuned, args=arguments, train_dataset=rows, callbacks=[turns])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return {
        "shape": options.shape, "rule": options.rule, "format": options.format, "layers": layers,
        "vocabulary": tuned.config.vocab_size, "tokens": options.accumulation * options.length,
        "threads": torch.get_num_threads(), "rounds": options.rounds,
        "stacking": report_of(trainer).report(finished=True).stacking,
        "seconds": {name: _median(times) for name, times in turns.wall.items()},
        "processor_seconds": {name: _median(times) for name, times in turns.processor.items()},
        "ratios": {name: _ratio(times, turns.wall["ktc"]) for name, times in turns.wall.items() if name != "ktc"},
    }  # fmt: skip


def _median(times: Sequence[float]) -> float:
    return round(statistics.median(times[1:]), 3)


def _ratio(times: Sequence[float], own: Sequence[float]) -> float:
    return _median([one / other for one, other in zip(times, own, strict=True)])


def main() -> None:
    """Measure one shape, and print its line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=tuple(LAYERS))
    parser.add_argument("--rule", default="moe-lora")
    parser.add_argument("--format", default="bf16")
    for name, default in (("rounds", 5), ("length", 512), ("accumulation", 4), ("layers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ktc-cpu-steps-") as folder:
        print(json.dumps(measured(options, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
