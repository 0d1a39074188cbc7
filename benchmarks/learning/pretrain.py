"""A stock Qwen3-MoE of 2 million parameters learns a `World` in fp32 and is saved as Hugging Face saves a checkpoint.

In: a world, a number of steps, a seed. Out: a folder with config, fp32 weights, tokenizer and chat template.
Rows are texts one behind the other, cut at `ROW` tokens. On one thread the result depends on the seed alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from learning.corpus import Document, documents, words
from learning.world import World

ROW = 96
BATCH = 16
LEARNING_RATE = 3e-3
_SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Byte pairs of the world's own texts: nearly every word is one token."""
    texts = (words(document) for document in islice(documents(world, seed=1), 4000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*_SPECIAL.values(), "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **_SPECIAL)
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def config(tokenizer: PreTrainedTokenizerFast, expert_width: int = 48) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=expert_width,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        rope_theta=10000.0,
        initializer_range=0.05,
        router_aux_loss_coef=0.01,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def rows(world: World, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Tensor]:
    """Batches (BATCH, ROW) of token ids without end."""
    ids: list[int] = []
    for document in documents(world, seed):
        ids += _encode(document, tokenizer)
        if len(ids) >= BATCH * ROW:
            yield torch.tensor(ids[: BATCH * ROW]).view(BATCH, ROW)
            ids = []


def _encode(document: Document, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    if isinstance(document, str):
        return tokenizer(f"{tokenizer.bos_token}{document}{tokenizer.eos_token}")["input_ids"]
    return tokenizer.apply_chat_template(document)["input_ids"]


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The size of the model, the loss of every step, and the processor time."""

    parameters: int
    losses: tuple[float, ...]
    seconds: float


def pretrain(world: World, folder: Path, *, steps: int, seed: int, expert_width: int = 48) -> Pretrained:
    """Trains and saves the model."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(world)
    model: Any = AutoModelForCausalLM.from_config(config(tokenizer, expert_width), dtype=torch.float32).train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"  {parameters:,} parameters, {len(tokenizer)} tokens in the vocabulary")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    losses: list[float] = []
    started = time.process_time()
    for step, batch in enumerate(islice(rows(world, tokenizer, seed), steps)):
        loss = model(input_ids=batch, labels=batch, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"  {time.process_time() - started:4.0f} s  step {step:4d}  loss {losses[-1]:6.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Pretrained(parameters, tuple(losses), time.process_time() - started)


def _rate(step: int, steps: int) -> float:
    """Up over the first 5 %, then down a cosine to a tenth."""
    if step < steps // 20:
        return (step + 1) / (steps // 20)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
