"""Next tokens of an exported GGUF file in llama.cpp and in ktc, side by side.

    ktc export MODEL --gguf --type f32 -o FOLDER
    python benchmarks/gguf_ranking.py FOLDER [--python build/llama/bin/python] [--prompts 50]

Compiles FOLDER with `moe-inference`, reads seeded random prompts with both, and prints how often the most probable
token and the order of the ten most probable are the same, and the largest difference of logits. `--reference`
computes ktc's side in fp32 by PyTorch, from the weights of the same file, and keeps llama.cpp's cache in fp32.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

import ktc
from ktc.tools.bench.peers import peer

_TOP = 10


def prompts(number: int, vocabulary: int) -> list[list[int]]:
    """Return seeded prompts of 3 to 40 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 41, (number,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def main() -> None:
    """Compare both on every prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, default=Path("build/llama/bin/python"))
    parser.add_argument("--format", default="stored", help="of the experts: fp32 files have no kernel of their own")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    file = min(options.folder.glob("*.gguf"))
    first = same_order = 0
    largest = 0.0
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "compiled"
        ktc.compile(options.folder, "moe-inference", out, settings={"format": options.format})
        model = ktc.load(out, reference=options.reference)
        llama = peer("llama").LlamaEngine(options.python, file, 1, stack)
        for tokens in prompts(options.prompts, model.config.get_text_config().vocab_size):
            with torch.no_grad():
                ours = model(torch.tensor([tokens])).logits[0, -1].float()
            theirs = llama.logits(tokens, exact=options.reference)
            first += int(ours.argmax()) == int(theirs.argmax())
            same_order += torch.equal(ours.topk(_TOP).indices, theirs.topk(_TOP).indices)
            largest = max(largest, float((ours - theirs).abs().max()))
    print(f"{file.name}: {options.prompts} prompts; the same next token {first}, the same ten in order {same_order}")
    print(f"largest difference of logits {largest:.2g}")


if __name__ == "__main__":
    main()
