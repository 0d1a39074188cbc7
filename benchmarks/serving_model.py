"""Write a checkpoint of OLMoE's or Qwen3-30B-A3B's sizes with random weights and a tokenizer of one token per word.

python benchmarks/serving_model.py olmoe 4 build/olmoe4
ktc compile build/olmoe4 moe-inference -o build/olmoe4_served
ktc bench serve build/olmoe4_served --clients 64 --seconds 600
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ktc.tools.bench.sizes import SIZES


def write(name: str, layers: int, folder: Path) -> None:
    """Write the first `layers` layers and the head, in bf16."""
    sizes = SIZES[name]
    config = AutoConfig.for_model(sizes.model_type, **{**sizes.config, "num_hidden_layers": layers})
    config.eos_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
