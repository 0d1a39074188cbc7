"""`make learn-curves`: 200 steps of the same adapter by stock PEFT and by ktc, on the CPU, a GPU and INT4 experts.

The pre-trained model of `make learn`, in bf16 and with experts of 64, is tuned to the bard's style with LoRA on
attention and experts. All ways of a seed begin with the same factors and read the same rows in the same order. Their
losses, and those of held-out people every 20 steps, are drawn; the spread over seeds is the noise they are held to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

import ktc
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer
from learning import curves_page
from learning.commands import ktc as command
from learning.data import write_data
from learning.experiment import pretrained
from learning.modes import EXPERT_WIDTH, LEARNING_RATE, in_bf16
from learning.world import make_world

ROOT: Final = Path(__file__).resolve().parents[2]
BATCH: Final = 16
EVERY: Final = 20  # steps between two losses of held-out people


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train. `format` is that of the experts, "" for the stock model; `device` multiplies them."""

    label: str
    format: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of a run: of every step, and of held-out people by step."""

    label: str
    seed: int
    losses: tuple[float, ...]
    held_out: Mapping[int, float]


WAYS: Final = (
    Way("stock PEFT, bf16"),
    Way("ktc, bf16 experts", "bf16"),
    Way("ktc, INT4 experts", "int4"),
    Way("ktc on a GPU, bf16 experts", "bf16", "cuda:0"),
    Way("ktc on a GPU, INT4 experts", "int4", "cuda:0"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make learn-curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "learning-curves")
    parser.add_argument("--quick", action="store_true", help="few steps, for a test")
    parser.add_argument("--docs", action="store_true", help="renew docs/details/learning.md and its picture")
    parser.add_argument("--seeds", type=int, default=3, help="how often each way trains; its spread is the noise")
    options = parser.parse_args()
    folder: Path = options.output.resolve()
    os.environ.setdefault("KTC_CACHE_DIR", str(folder / "cache"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sizes = (40, 4) if options.quick else (520, 200)
    curves = run(folder, *sizes, seeds=1 if options.quick else options.seeds)
    (folder / "curves.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=1), encoding="utf-8")
    measured = f"{datetime.now(UTC):%Y-%m-%d}", ", ".join(f"{name} {version(name)}" for name in ("torch", "peft"))
    curves_page.write(curves, folder, *measured)
    if options.docs:
        curves_page.renew(curves, ROOT / "docs" / "details", *measured)


def run(folder: Path, pretrain_steps: int, steps: int, *, seeds: int) -> tuple[Curve, ...]:
    """Train in every way that this machine has, with every seed."""
    world = make_world(0)
    files = write_data(world, folder / "data")["style"]
    pretrained(world, folder / "model-fp32", pretrain_steps, EXPERT_WIDTH)
    model = in_bf16(folder)
    tuning, held_out = (_rows(path, model) for path in files)
    ways = [way for way in WAYS if way.device == "cpu" or torch.cuda.is_available()]
    places = dict.fromkeys(_place(way) for way in ways if way.format)
    outs = {place: _compiled(model, *place, folder) for place in places}
    curves: list[Curve] = []
    for seed in range(seeds):
        start = _first_factors(model, next(iter(outs.values())), folder / f"factors-{seed}", seed)
        for way in ways:
            base = ktc.load(outs[_place(way)]) if way.format else _stock(model)
            adapted = PeftModel.from_pretrained(_placed(base, way), start, is_trainable=True)
            curves.append(_trained(adapted, way, (tuning, held_out), steps, seed))
            print(
                f"{way.label}, seed {seed}: {_mean(curves[-1].losses[-EVERY:]):.4f}, {curves[-1].held_out}", flush=True
            )
    return tuple(curves)


def _stock(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)


def _place(way: Way) -> tuple[str, str]:
    """Return the format of the experts and the device of everything else."""
    return way.format, way.device


def _compiled(model: Path, name: str, device: str, folder: Path) -> Path:
    out = folder / f"out_{name}_{device.partition(':')[0]}"
    settings = "--set", f"format={name}", "--set", f"device={device}"
    command("compile", model, "moe-experts-lora", *settings, "-o", out, "--force")
    return out


def _first_factors(model: Path, out: Path, folder: Path, seed: int) -> Path:
    """Save the factors that all ways of a seed begin with, as stock PEFT makes them."""
    torch.manual_seed(seed)
    get_peft_model(_stock(model), read_lora_config(out)).save_pretrained(str(folder))
    return folder


def _placed(model: Any, way: Way) -> Any:
    """Let a GPU multiply the experts of `model`, where the way says so."""
    for module in model.modules() if way.device != "cpu" else ():
        if isinstance(module, FusedMoe):
            module.offload = Offload((torch.device(way.device),), min_tokens=1)
    return model


def _rows(path: Path, model: Path) -> list[dict[str, list[int]]]:
    """Return the token ids of each chat, with the answer's as labels."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows: list[dict[str, list[int]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        asked, whole = (
            list(tokenizer.apply_chat_template(chat, add_generation_prompt=ends, return_dict=True)["input_ids"])
            for chat, ends in ((messages[:-1], True), (messages, False))
        )
        rows.append({"input_ids": whole, "labels": [-100] * len(asked) + whole[len(asked) :]})
    return rows


def _trained(model: Any, way: Way, data: Sequence[Any], steps: int, seed: int) -> Curve:
    with tempfile.TemporaryDirectory() as run_folder:
        arguments = TrainingArguments(
            output_dir=run_folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
            bf16=True, use_cpu=way.device == "cpu", logging_steps=1, eval_strategy="steps", eval_steps=EVERY,
            per_device_eval_batch_size=64, report_to=[], save_strategy="no", disable_tqdm=True, seed=seed,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
        trainer = (KTrainer if way.format else Trainer)(
            model=model, args=arguments, train_dataset=data[0], eval_dataset=data[1],
            data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    history = trainer.state.log_history
    losses = tuple(entry["loss"] for entry in history if "loss" in entry)
    return Curve(
        way.label, seed, losses, {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values)


if __name__ == "__main__":
    main()
