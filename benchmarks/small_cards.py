"""Training on a small card: the planner's choice where the allocator of a larger GPU is capped.

    python benchmarks/small_cards.py --model qwen3-30b-a3b --card 8 [--layers 6] [--steps 50] [--json]

Compiles a model of real sizes with random weights by the bundled rule `auto` (adapters on attention and on every
routed expert) and trains it for `--steps` steps of `--accumulation` sequences, whose lengths are drawn from
`--lengths`. Of `--card` GB (1e9 bytes) a context has 0.5 GB; PyTorch's allocator refuses more than the rest, and the
planner reads the rest as free memory. A model of fewer layers gets a smaller card: `--card` less `--layer-bytes` for
each missing layer, by default what the layer's weights beside its routed experts have. A run ends after `--seconds`.
Printed: token/s of the steps behind the third, the peak of the allocator, host memory, and how the run ended.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final, cast

import psutil
import torch
from peft import get_peft_model
from transformers import Glm4MoeConfig, GptOssConfig, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ktc import compiler
from ktc.model.loading import peft_glue
from ktc.model.loading.load import load
from ktc.stages.plan import BatchShape
from ktc.tools.bench.stack import stack_of
from ktc.training import KTrainer
from ktc.training.trainers.report import report_of

CONTEXT: Final = 500_000_000  # bytes that CUDA's context and its kernels have beside the allocator's
_START: Final = time.perf_counter()
WARM: Final = 3  # steps that compile, and are not counted
CONFIGS: Final = Path(__file__).resolve().parents[1] / "tests/configs"


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a name of tests/configs, gpt-oss-20b, glm-4.5-air")
    parser.add_argument("--card", type=float, default=0, help="GB; 0: no cap")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--rule", default="auto")
    parser.add_argument("--alone", type=Path, help="a lock: its holder measures, and other runs wait between two steps")
    parser.add_argument("--measures", action="store_true", help="hold the lock from step 4 on, and profile the last")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--layer-bytes", type=int)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--lengths", default="64,128,256,384,512,768,1024")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def config_of(name: str, folder: Path) -> str:
    """Return the folder of a config."""
    if name == "gpt-oss-20b":
        config: Any = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    elif name == "glm-4.5-air":
        config = Glm4MoeConfig(head_dim=128, attention_bias=True)  # else transformers' defaults are its sizes
    else:
        return str(CONFIGS / name if (CONFIGS / name).is_dir() else name)
    config.architectures = [{"gpt_oss": "GptOssForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}[config.model_type]]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return str(folder)


def cap(card: int) -> None:
    """Let PyTorch allocate `card` bytes less a context, and tell every reader of free memory so."""
    properties = cast("Any", torch.cuda).get_device_properties(0)
    total, room = int(properties.total_memory), card - CONTEXT
    torch.cuda.set_per_process_memory_fraction(room / total, 0)

    def mem_get_info(_device: Any = None) -> tuple[int, int]:
        return max(0, room - torch.cuda.memory_reserved(0)), total

    torch.cuda.mem_get_info = mem_get_info


def bytes_beside_experts(model: Any) -> int:
    """Return the bytes of the last layer's weights that are no routed expert's."""
    layers = [name for name, module in model.named_modules() if name.endswith(".layers") and len(list(module))]
    stem = f"{layers[0]}.{len(model.get_submodule(layers[0])) - 1}."
    inside = [(name, value) for name, value in model.named_parameters() if name.startswith(stem)]
    return sum(v.numel() * v.element_size() for name, v in inside if ".experts." not in name)


class Watch(TrainerCallback):
    """Times steps, ends the run where its time is over, and profiles the last step where asked."""

    def __init__(self, options: argparse.Namespace, end: float) -> None:
        self.end, self.times, self.began = end, list[float](), 0.0
        self.measures, self.last = options.measures, options.steps - 1
        self.lock = options.alone and options.alone.open("w")
        self.profile: Any = None
        self.kernels: dict[str, float] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock, when no other run measures."""
        counted = len(self.times) >= WARM
        if self.lock and counted:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if not self.measures:
                fcntl.flock(self.lock, fcntl.LOCK_UN)
        if self.measures and len(self.times) == self.last and torch.cuda.is_available():
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.start()
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step's seconds."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times.append(now - self.began)
        if self.profile is not None:
            self.profile.stop()
            self.kernels = busy(self.profile)
        if len(self.times) <= WARM or self.times[-1] > 5 * self.times[WARM - 2]:
            print(f"  step {len(self.times)}: {self.times[-1]:.2f} s", flush=True)
        control.should_training_stop = control.should_training_stop or now > self.end


def busy(profile: Any) -> dict[str, float]:
    """Return the seconds of copies and of kernels of a profiled step, as sums."""
    sums: dict[str, float] = {}
    for entry in profile.key_averages():
        name = " ".join(entry.key.split()[:2]) if entry.key.startswith("Mem") else "kernels"
        sums[name] = sums.get(name, 0.0) + entry.self_device_time_total / 1e6
    largest = sorted(profile.key_averages(), key=lambda entry: -entry.self_device_time_total)[:6]
    return sums | {f"{entry.key[:50]} x {entry.count}": entry.self_device_time_total / 1e6 for entry in largest}


def compiled(options: argparse.Namespace, folder: Path, lengths: list[int]) -> tuple[Path, Any]:
    """Return the compiled model's folder and its plan."""
    stack = stack_of(config_of(options.model, folder / "config"), options.layers, folder / "layers")
    of_auto = {"use": "train", "experts": "true"} if options.rule == "auto" else {}
    settings = of_auto | {"format": options.format}
    settings |= dict(entry.split("=", 1) for entry in options.set)
    reading = compiler.Reading(random_weights=True, to_compile=True)
    card = int(options.card * 1e9)
    if card and stack.layers < stack.depth:
        if options.layer_bytes is None:
            _, captured, _ = compiler.read(stack.model, options.rule, settings, reading=reading)
            options.layer_bytes = bytes_beside_experts(captured.model)
        card -= (stack.depth - stack.layers) * options.layer_bytes
    if card and torch.cuda.is_available():
        cap(card)
    print(f"{options.model}: {stack.layers} of {stack.depth} layers, card {card / 1e9:.2f} GB", flush=True)
    analysis = compiler.analyse(
        stack.model, options.rule, settings, must_fit=BatchShape(1, max(lengths)), reading=reading
    )
    for usage in analysis.plan.devices:
        print(f"  plan {usage}"[:400])
    return compiler.complete(analysis, folder / "tuned_by_bench"), analysis


def trained(options: argparse.Namespace, folder: Path, out: Path, lengths: list[int], end: float) -> dict[str, Any]:
    """Train, and return the measurements."""
    model = load(out, random_weights=0)
    host = psutil.Process().memory_info().rss / 1e9
    print(f"  loaded after {time.perf_counter() - _START:.1f} s, {host:.1f} GB of the host", flush=True)
    torch.manual_seed(0)
    lora = peft_glue.read_lora_config(out)
    tuned: Any = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(0)
    count = options.steps * options.accumulation
    drawn = cast("list[int]", torch.randint(len(lengths), (count,), generator=generator).tolist())
    rows = [torch.randint(tuned.config.vocab_size, (lengths[at],), generator=generator) for at in drawn]
    args = TrainingArguments(
        output_dir=str(folder / "run"), max_steps=options.steps, per_device_train_batch_size=1, learning_rate=1e-4,
        gradient_accumulation_steps=options.accumulation, bf16=True, use_cpu=not torch.cuda.is_available(),
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, dataloader_num_workers=0, seed=0,
    )  # fmt: skip
    watch = Watch(options, end)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = KTrainer(model=tuned, args=args, train_dataset=data, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    ended = "finished"
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:  # what the run is to find out
        ended = f"out of memory: {str(error)[:1500]}"
    if watch.lock:
        fcntl.flock(watch.lock, fcntl.LOCK_UN)
    report = report_of(trainer).report(finished=ended == "finished")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counted = watch.times[WARM : len(watch.times) - bool(watch.kernels)]
    tokens = sum(map(len, rows)) / options.steps  # on average: rows are drawn alike
    median = sorted(counted)[len(counted) // 2] if counted else None
    return {
        "ended": ended, "steps": len(watch.times), "tokens_per_step": tokens, "median": median,
        "token_per_second": tokens * len(counted) / sum(counted) if counted else None,
        "losses": [losses[0], losses[-1]] if losses else [], "stacking": str(report.stacking),
        "offload": str(report.offload), "adapters": str(report.expert_adapters), "phases": str(report.phases)[:600],
        "streams": str(report.streams)[:500], "worst_step": max(counted, default=None),
        "busy": watch.kernels,
    }  # fmt: skip


def main() -> None:
    """Compile, train and print."""
    options, start = parsed(), time.perf_counter()
    lengths = [int(word) for word in options.lengths.split(",")]
    with tempfile.TemporaryDirectory() as name:
        out, _ = compiled(options, Path(name), lengths)
        print(f"  compiled after {time.perf_counter() - start:.1f} s", flush=True)
        row = trained(options, Path(name), out, lengths, start + options.seconds)
    if torch.cuda.is_available():
        row["reserved"] = torch.cuda.max_memory_reserved() / 1e9
        row["allocated"] = torch.cuda.max_memory_allocated() / 1e9
    row |= {"model": options.model, "card": options.card, "format": options.format, "layers": options.layers}
    row["host"] = psutil.Process().memory_info().rss / 1e9
    print(json.dumps(row) if options.json else "\n".join(f"  {k}: {v}" for k, v in row.items()), flush=True)
    os._exit(0)  # pinned memory takes seconds to free


if __name__ == "__main__":
    main()
