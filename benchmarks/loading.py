"""Loading a model of several gigabytes: Hugging Face, ktc from the checkpoint, from a packed store read and mapped.

    python benchmarks/loading.py [--size-gb 4] [--shape qwen3] [--json]

Builds a checkpoint of random bf16 weights in shards, with one tensor per expert and projection as in older checkpoints.
Compiles it with `moe-lora`, packs it, and measures each way of loading in its own processes. Measured are the seconds
of the weights stage, the most anonymous memory, and the time of decoding afterwards. Decoding is the first pass over 16
tokens (where a mapped model touches its pages), then one token at a time. ktc's kernels use the threads that the plan
chose, PyTorch one: compare the tokens of ktc's rows with one another, not with "hf". "cold" drops the files from the
page cache first, "warm" follows a load of the same kind. All files are in a folder below the system's temporary one and
are removed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

# experts, hidden, intermediate, experts per token
SHAPES: Final = {"qwen3": (128, 2048, 768, 8), "v2lite": (64, 2048, 1408, 6)}
SHARD_BYTES: Final = 1 << 30
VOCABULARY: Final = 32000
DECODED: Final = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-gb", type=float, default=4.0)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("METHOD", "FOLDER", "DECODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measured(*options.measure)))
        return
    folder = Path(tempfile.mkdtemp(prefix="ktc-loading-"))
    try:
        report = _run(folder, options.size_gb, options.shape)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(report, indent=1) if options.json else _table(report))


def _run(folder: Path, size_gb: float, shape: str) -> dict[str, Any]:
    free = shutil.disk_usage(folder).free
    if free < 2.5e9 * size_gb:
        sys.exit(f"{folder} has {free / 1e9:.0f} GB free; the checkpoint and its packed store need {2.2 * size_gb:.0f}")
    model, out = folder / "model", folder / "loaded_model"
    stored = _write_checkpoint(model, size_gb, shape)
    _say(f"wrote {stored / 1e9:.2f} GB; compiling")
    import ktc

    ktc.compile(model, "moe-lora", out)
    rows = [_row("hf", "warm", model), _row("unpacked", "cold", out), _row("unpacked", "warm", out)]
    started = time.perf_counter()
    packed = ktc.pack(out)
    pack_seconds = time.perf_counter() - started
    _say(f"packed {packed.size / 1e9:.2f} GB in {pack_seconds:.1f} s")
    started = time.perf_counter()
    assert all(finding.state == "good" for finding in ktc.verify(out))
    verify_seconds = time.perf_counter() - started
    for method in ("read", "map"):
        rows += [_row(method, "cold", out), _row(method, "warm", out)]
    return {
        "shape": shape,
        "checkpoint_bytes": stored,
        "packed_bytes": packed.size,
        "pack_seconds": pack_seconds,
        "verify_seconds": verify_seconds,
        "layer_cpu_ms": layer_speed(shape),
        "rows": rows,
    }


# The checkpoint


def _write_checkpoint(folder: Path, size_gb: float, shape: str) -> int:
    """Write shards, index and config of a Qwen3-MoE model of at least `size_gb`; return the bytes of its tensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    experts, hidden, inner, top_k = SHAPES[shape]
    layer_bytes = experts * 3 * hidden * inner * 2
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=top_k,
        num_hidden_layers=-int(-size_gb * 1e9 // layer_bytes),
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=VOCABULARY,
        dtype=torch.bfloat16,
        architectures=["Qwen3MoeForCausalLM"],
    )
    folder.mkdir()
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    number = 0
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(1)).mul_(0.02).bfloat16()
    noise = noise.repeat(-(-VOCABULARY * hidden // len(noise)) + 1)
    for place, (name, size) in enumerate(_tensors(config)):
        begin = place * 4099 % (1 << 24)  # each tensor is a different slice of the noise
        values = noise[begin : begin + torch.Size(size).numel()].reshape(size)
        shard[name] = torch.ones_like(values) if "norm" in name else values.clone()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            number = _write_shard(folder, shard, weight_map, number, save_file)
    number = _write_shard(folder, shard, weight_map, number, save_file)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def _write_shard(folder: Path, shard: dict[str, Any], weight_map: dict[str, str], number: int, save: Any) -> int:
    if shard:
        file = f"model-{number + 1:05d}.safetensors"
        save(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()
    return number + 1


def _tensors(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes as in checkpoints of this family, experts one by one."""
    hidden, inner, head = config.hidden_size, config.moe_intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "lm_head.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config.num_hidden_layers):
        stem = f"model.layers.{layer}"
        yield f"{stem}.input_layernorm.weight", (hidden,)
        yield f"{stem}.post_attention_layernorm.weight", (hidden,)
        yield f"{stem}.self_attn.q_proj.weight", (heads * head, hidden)
        yield f"{stem}.self_attn.k_proj.weight", (kv_heads * head, hidden)
        yield f"{stem}.self_attn.v_proj.weight", (kv_heads * head, hidden)
        yield f"{stem}.self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{stem}.self_attn.q_norm.weight", (head,)
        yield f"{stem}.self_attn.k_norm.weight", (head,)
        yield f"{stem}.mlp.gate.weight", (config.num_experts, hidden)
        for expert in range(config.num_experts):
            yield f"{stem}.mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{stem}.mlp.experts.{expert}.up_proj.weight", (inner, hidden)
            yield f"{stem}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)


# Measuring


def _row(method: str, cache: str, folder: Path) -> dict[str, Any]:
    if cache == "cold":
        _forget(folder)
        _forget(folder.parent / "model")
    command = [sys.executable, __file__, "--measure", method, str(folder), "no" if cache == "cold" else "yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    row = {"method": method, "cache": cache, **found}
    _say(f"{row}")
    return row


def layer_speed(shape: str) -> dict[str, float]:
    """Time one layer's experts: one token, one thread, all pages touched. CPU milliseconds, read and mapped in turn."""
    import torch

    from ktc.foundation import host
    from ktc.model.experts.layouts.packed import PackedExperts
    from ktc.model.experts.module import FusedMoe
    from ktc.model.experts.weights import ExpertsWeights
    from ktc.model.kernels.form import ExpertsSizes, parse_form
    from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
    from ktc.model.packed_store import packed_file
    from ktc.model.packed_store.packed_file import Header, Origin
    from ktc.stages.codegen import build, render

    num_experts, hidden, inner, top_k = SHAPES[shape]
    isa = host.detect().isas[0]
    spec = FusedMoeSpec("fused_moe", hidden, inner, num_experts, top_k, "bf16", "bf16", "bf16", isa)
    kernel = build.build(render.render([spec], {spec: "benchmark"}), host.detect()).kernel(spec.entry)
    form, sizes = parse_form("silu"), ExpertsSizes(num_experts, hidden, inner, top_k)
    read, mapped = (
        FusedMoe(ExpertsWeights(form, sizes, torch.bfloat16, PackedExperts(kernel, 1, sizes))) for _ in range(2)
    )
    read.weights.take_packed()
    storage = read.weights.packed_storage
    torch.frombuffer(storage, dtype=torch.bfloat16).normal_(std=0.02)

    def header(content: str) -> Header:
        return Header(packed_file.SCHEMA, "", spec.entry, num_experts, len(storage), Origin("", "", ""), content)

    with tempfile.TemporaryDirectory(prefix="ktc-loading-") as folder:
        path = Path(folder) / "layer.packed"
        packed_file.write(path, header, storage, lambda _: None)
        mapping = packed_file.map_read_only(path, len(storage))
    mapped.weights.take_packed(mapping)
    for begin in range(0, len(storage), 4096):  # touch every page
        mapping[begin]
    x = torch.randn(1, hidden).bfloat16()
    routings = [torch.randperm(num_experts)[None, :top_k] for _ in range(64)]
    weights = torch.full((1, top_k), 1 / top_k)
    times: dict[str, list[float]] = {"read": [], "map": []}
    with torch.no_grad():
        for _ in range(20):
            for name, module in (("read", read), ("map", mapped)):
                begun = time.process_time()
                for index in routings:
                    module(x, index, weights)
                times[name].append((time.process_time() - begun) / len(routings) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _measured(method: str, folder: str, decode: str) -> dict[str, Any]:
    """Measure one load in this process, and the decoding after it."""
    import torch

    torch.set_num_threads(1)
    with _Watch() as watch:
        model, seconds, stage = _load(method, folder)
    report = {"seconds": seconds, "weights_seconds": stage, "peak_anonymous": watch.growth}
    if decode == "yes":
        report |= _decoded(model)
    return report


def _load(method: str, folder: str) -> tuple[Any, float, float]:
    """Return the model, the seconds of the whole load, and those of its weights stage."""
    import torch

    if method == "hf":
        from transformers import AutoModelForCausalLM

        started = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        seconds = time.perf_counter() - started
        return model, seconds, seconds
    import ktc
    from ktc.model.packed_store import weights_stage

    inner, stages = weights_stage.fill_weights, list[float]()

    def timed(*arguments: Any, **options: Any) -> None:
        begun = time.perf_counter()
        inner(*arguments, **options)
        stages.append(time.perf_counter() - begun)

    weights_stage.fill_weights = timed
    started = time.perf_counter()
    model = ktc.load(folder, map=method == "map")
    return model, time.perf_counter() - started, stages[0]


def _decoded(model: Any) -> dict[str, float]:
    """Return milliseconds of the first pass, and of one token with a cache: the median after the first few."""
    import torch

    ids = torch.arange(100, 116)[None]
    times: list[float] = []
    with torch.no_grad():
        begun = time.perf_counter()
        state = model(ids, use_cache=True)
        first = time.perf_counter() - begun
        for _ in range(DECODED + 4):
            token = state.logits[:, -1:].argmax(-1)
            begun = time.perf_counter()
            state = model(token, past_key_values=state.past_key_values, use_cache=True)
            times.append(time.perf_counter() - begun)
    return {"first_ms": first * 1e3, "token_ms": statistics.median(times[4:]) * 1e3}


class _Watch:
    """The most anonymous memory of the process while watched, above its amount before."""

    def __enter__(self) -> _Watch:
        self._done = threading.Event()
        self._before = self._most = _anonymous()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.01):
            self._most = max(self._most, _anonymous())

    @property
    def growth(self) -> int:
        return self._most - self._before


def _anonymous() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


# Reporting


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _table(report: dict[str, Any]) -> str:
    unpacked = next(r for r in report["rows"] if r["method"] == "unpacked" and r["cache"] == "warm")
    sizes = f"checkpoint {report['checkpoint_bytes'] / 1e9:.2f} GB, packed {report['packed_bytes'] / 1e9:.2f} GB"
    lines = [
        f"{sizes} in {report['pack_seconds']:.1f} s, verified in {report['verify_seconds']:.1f} s",
        "| load | page cache | whole load | weights stage | speed | peak anonymous | 16 tokens | one token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        faster = f"{unpacked['weights_seconds'] / row['weights_seconds']:.1f}x"
        first, token = (f"{row[name]:.1f} ms" if name in row else "" for name in ("first_ms", "token_ms"))
        lines.append(
            f"| {row['method']} | {row['cache']} | {row['seconds']:.2f} s | {row['weights_seconds']:.3f} s | {faster} "
            f"| {row['peak_anonymous'] / 1e9:.2f} GB | {first} | {token} |"
        )
    layer = report["layer_cpu_ms"]
    lines.append(f"one layer, one token, CPU time: read {layer['read']:.3f} ms, mapped {layer['map']:.3f} ms")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
