"""Time and memory of `ktc quantize` on a slice of DeepSeek-V3's shape.

    python benchmarks/quantise_slice.py FOLDER [--layers 3] [--experts 24] [--modules experts|linears]

Writes the checkpoint of the first layers, the last of them with routed experts, each of V3's own sizes but with fewer
of them, and with random bf16 weights. Then it runs the command in a process of its own and prints its rate, in bytes of
the original, and its largest resident memory, which does not depend on the number of layers.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

_SHARD = 4 << 30  # bytes, as the original's


def write_slice(folder: Path, layers: int, experts: int) -> int:
    """Write the checkpoint, if it is not there, and return its bytes."""
    config = DeepseekV3Config(
        num_hidden_layers=layers, first_k_dense_replace=layers - 1, n_routed_experts=experts, n_group=1, topk_group=1,
        vocab_size=16384, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        config.architectures = ["DeepseekV3ForCausalLM"]
        config.save_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shards: list[dict[str, tuple[int, ...]]] = [{}]
        for name, shape in _stored(model):
            if sum(2 * torch.Size(each).numel() for each in shards[-1].values()) > _SHARD:
                shards.append({})
            shards[-1][name] = shape
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        for file, shard in zip(files, shards, strict=True):
            save_file({name: _random(shape) for name, shape in shard.items()}, folder / file, {"format": "pt"})
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _stored(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes as checkpoints of this model have them: experts one by one."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            found.append((name, tuple(tensor.shape)))
            continue
        count, rows, columns = tensor.shape
        parts = (("down_proj", rows),) if leaf == "down_proj" else (("gate_proj", rows // 2), ("up_proj", rows // 2))
        found += [(f"{stem}.{e}.{part}.weight", (size, columns)) for e in range(count) for part, size in parts]
    return found


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)


def main() -> None:
    """Write the slice, run the command, print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--modules", default="experts")
    options = parser.parse_args()
    size = write_slice(options.folder / "original", options.layers, options.experts)
    out = options.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    parts = ["quantize", str(options.folder / "original"), "-o", str(out), "--modules", options.modules, "--json"]
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "ktc", *parts], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout)
    print(f"{result['quantised']} of {result['tensors']} tensors, {size / 1e9:.2f} GB in {seconds:.1f} s")
    print(f"{size / 1e9 / seconds:.3f} GB/s ({size / 1e9 / used.ru_utime:.3f} per second of user CPU time)")
    print(f"largest resident memory {used.ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
