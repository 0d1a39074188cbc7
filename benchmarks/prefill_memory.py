"""Memory of reading one long prompt through `generate`: in one pass, and in chunks.

    python benchmarks/prefill_memory.py [--tokens 32768] [--chunk 1024 256] [--json]

Compiles a small Qwen3-MoE (one layer, hidden 256, 4 query and 2 key heads of 64, 8 experts, bf16, random weights) with
`moe-inference`. Each variant has a process of its own, which reads a short prompt first and then `--tokens` random
tokens, and generates one. `start` is the resident memory between the two, `peak` the most in the second call, `cache`
the bytes of keys and values, and `attention` what transformers and PyTorch make of them in the last chunk: a mask, a
bool per new token and position, its copy in bf16, and keys and values repeated for their query heads. All MB are 1e6
bytes. The folder of the model is temporary.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 1024
WARM: Final = 64  # tokens of the first prompt
_QUERY_HEADS: Final = 4
_KEY_HEADS: Final = 2
_MASK_BYTES: Final = 1 + 2  # bool, and bf16


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one process, the seconds of the long prompt, and the token after it. `chunk` 0 is one pass."""

    chunk: int
    tokens: int
    start: int
    peak: int
    cache: int
    attention: int
    seconds: float
    token: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--chunk", type=int, nargs="+", default=[1024, 256], help="tokens of a pass; 0 is one pass")
    parser.add_argument("--no-one-pass", action="store_true", help="measure the chunks alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "CHUNK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asdict(_measured(Path(options.measure[0]), int(options.measure[1]), options.tokens))))
        return
    chunks = [*([] if options.no_one_pass else [0]), *options.chunk]
    with tempfile.TemporaryDirectory(prefix="ktc-prefill-") as folder:
        out = _compiled(Path(folder), options.tokens)
        found = [_in_own_process(out, chunk, options.tokens) for chunk in chunks]
    print(json.dumps([asdict(each) for each in found], indent=1) if options.json else _table(found))


def _compiled(folder: Path, tokens: int) -> Path:
    """Write the checkpoint and compile it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import ktc

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=1, num_attention_heads=_QUERY_HEADS, num_key_value_heads=_KEY_HEADS, head_dim=64,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=tokens + WARM, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    return ktc.compile(folder / "model", "moe-inference", folder / "prefill_model")


def _in_own_process(out: Path, chunk: int, tokens: int) -> Measured:
    words = [sys.executable, __file__, "--tokens", str(tokens), "--measure", str(out), str(chunk)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _measured(out: Path, chunk: int, tokens: int) -> Measured:
    import torch

    import ktc

    model: Any = ktc.load(out)
    model.eval()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=draw)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 1, "return_dict_in_generate": True}
    if chunk:
        options["prefill_chunk_size"] = chunk
    model.generate(ids[:, :WARM], **options)
    start = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    begun = time.perf_counter()
    found = model.generate(ids, **options)
    seconds = time.perf_counter() - begun
    peak = _resident("VmHWM")
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in found.past_key_values.layers)
    # One pass is causal from the first token on: it takes no mask, and key heads are not repeated.
    chunked = 0 < chunk < tokens
    attention = chunk * tokens * _MASK_BYTES + cache * _QUERY_HEADS // _KEY_HEADS if chunked else 0
    return Measured(chunk, tokens, start, peak, cache, attention, seconds, int(found.sequences[0, -1]))


def _resident(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _table(found: list[Measured]) -> str:
    lines = [
        f"{found[0].tokens:,} tokens; MB",
        "pass        start   peak   peak - start   cache   attention   seconds   token",
    ]
    for each in found:
        name = f"{each.chunk:,}" if each.chunk else "one"
        amounts = each.start, each.peak, each.peak - each.start, each.cache, each.attention
        start, peak, more, cache, attention = (f"{nbytes / 1e6:,.0f}" for nbytes in amounts)
        lines.append(
            f"{name:8} {start:>8} {peak:>6} {more:>14} {cache:>7} {attention:>11} {each.seconds:>9.1f} {each.token:>7}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
