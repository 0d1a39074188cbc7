"""LoRA tuning of DeepSeek-V2-Lite at its real size on one GPU: token/s, GPU memory, and the time of each phase of a
step.

    python benchmarks/finetune.py [--layers 27] [--steps 4] [--accumulation 16] [--length 512] [--experts gpu,cpu]

Builds a checkpoint of random bf16 weights from tests/configs/deepseek-v2-lite (31 GB at all 27 layers, in a folder
below the system's temporary one, removed at the end), compiles it by `moe-lora` with attention on the GPU, and trains
on random tokens with KTrainer: rank 8, alpha 32, dropout 0.1, bf16. `--experts gpu` sends the experts of a layer to the
GPU in each pass (`prefill`), `cpu` multiplies them on the host; both are measured in one process, on one load. The
first step of each is not counted. Without a GPU everything runs on the CPU: choose few layers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import ktc
from ktc.experts.module import FusedMoe
from ktc.model import peft_glue
from ktc.training import KTrainer

CONFIG: Final = Path(__file__).parent.parent / "tests" / "configs" / "deepseek-v2-lite"
RULES: Final = "moe-lora"
_NOISE: Final = 1 << 22  # random numbers from which all weights of a layer are made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--experts", default="gpu,cpu")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made, and stays")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ktc-finetune-"))
    try:
        report = _run(folder, options)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    print(json.dumps(report, indent=1) if options.json else _table(report))


def _run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()

    def told(what: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)

    model, out = folder / "model", folder / "v2lite_tuned"
    if not (model / "config.json").exists():
        write_checkpoint(model, options.layers)
        told("checkpoint written")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    ktc.compile(model, RULES, out, settings={"device": device, "prefill": device}, force=True)
    told("compiled")
    base = ktc.load(out)
    told("loaded")
    tuned = get_peft_model(base, peft_glue.read_lora_config(out))
    layers = [module for module in base.modules() if isinstance(module, FusedMoe)]
    where = [layer.offload for layer in layers]
    rows = {}
    for experts in options.experts.split(","):
        for layer, offload in zip(layers, where, strict=True):
            layer.offload = offload if experts == "gpu" else None
        rows[experts] = train(tuned, folder / experts, options)
        told(f"experts on the {experts}: {rows[experts]['tokens_per_second']:.0f} token/s")
    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "layers": options.layers,
        "rows": rows,
    }


def train(model: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train once and return the figures: step_time in seconds, GPU memory in bytes."""
    generator = torch.Generator().manual_seed(0)
    size = (options.accumulation * options.steps, options.length)
    ids = torch.randint(0, model.config.vocab_size, size, generator=generator)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=1e-4,
        bf16=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = KTrainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    measured = json.loads((folder / "ktc_report.json").read_text())
    return {
        "step_time": measured["speed"]["step_time"],
        "tokens_per_second": measured["speed"]["tokens_per_second"],
        "gpu_peak_allocated": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "gpu_peak_reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        "host_peak_rss": measured["host_peak_rss"],
        "phases": measured["phases"],
        "stacking": measured["stacking"],
        "loss": [each["loss"] for each in measured["history"] if each.get("loss") is not None],
    }


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write a checkpoint with one tensor per expert and projection, in one file per layer."""
    settings = json.loads((CONFIG / "config.json").read_text()) | {"num_hidden_layers": layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"layer-{layer}.safetensors", {}).update(_stored(name, tuple(tensor.shape)))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: _write(folder / pair[0], pair[1]), files.items()))
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _stored(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a published checkpoint has for one of the model's."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        experts, rows, columns = shape
        parts = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
    elif leaf == "down_proj":
        experts, parts = shape[0], {leaf: shape[1:]}
    else:
        return {name: shape}
    return {f"{parent}.{expert}.{part}.weight": size for expert in range(experts) for part, size in parts.items()}


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(len(path.name))
    noise = torch.randn(_NOISE, generator=generator).mul_(0.02).bfloat16().repeat(2)
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        size = torch.Size(shape).numel()
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        begin = 7919 * number % _NOISE  # otherwise all experts would be equal
        whole = noise[begin : begin + _NOISE].repeat(-(-size // _NOISE))
        tensors[name] = whole[:size].reshape(shape).clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['device']}, {report['layers']} layers"]
    for experts, row in report["rows"].items():
        lines.append(
            f"experts on the {experts}: {row['tokens_per_second']:,.0f} token/s, step {row['step_time']:.2f} s, GPU "
            f"{row['gpu_peak_allocated'] / 1e9:.2f} GB allocated, {row['gpu_peak_reserved'] / 1e9:.2f} GB reserved; "
            f"host {row['host_peak_rss'] / 1e9:.1f} GB; loss {statistics.fmean(row['loss']):.3f}; {row['stacking']}"
        )
        lines += [f"    {phase:14s} {seconds:7.3f} s" for phase, seconds in row["phases"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
