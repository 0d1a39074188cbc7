"""Modules whose few new tokens the decode kernel computes: the stock model's logits, and stock code for other calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoding_models import CHUNKS, LENGTH, absorbed, decoded, difference, inputs, latent_modules, stock_model
from kernel_layers import built
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.decoding import decoding
from ktc.model.kernels.attention_spec import AttentionSpec

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = AttentionSpec("attention", "fp32", "scalar")


class Counted(DecodeAttention):
    calls: list[int] = []  # noqa: RUF012 - of all modules of a test

    def __call__(self, query: Tensor, *args: Any, **options: Any) -> Tensor:
        self.calls.append(query.shape[2])
        return super().__call__(query, *args, **options)


@pytest.fixture
def kernel() -> Counted:
    Counted.calls.clear()
    return Counted(built((SPEC,)).kernel(SPEC.entry), 2)


def decoding_model(stock: PreTrainedModel, kernel: DecodeAttention) -> PreTrainedModel:
    model = copy.deepcopy(stock)
    for layer in model.model.layers:
        decoding(layer.self_attn, kernel)
    return model


# Grouped-query attention; sinks and windows, which run eager; a soft cap, which stays with the stock function.
@pytest.mark.parametrize(("family", "taken"), [("qwen3_moe", True), ("gpt_oss", True), ("gemma2", False)])
def test_few_tokens_are_computed_by_the_kernel(family: str, taken: bool, kernel: Counted) -> None:
    stock = stock_model(family, torch.float32)
    model = decoding_model(stock, kernel)
    assert difference(decoded(model), decoded(stock)) <= 1e-5
    layers = model.config.num_hidden_layers
    assert kernel.calls == ([chunk for chunk in CHUNKS[1:] for _ in range(layers)] if taken else [])


def test_latents_are_computed_by_the_kernel(kernel: Counted) -> None:
    stock = stock_model("deepseek_v2", torch.float32)
    model = absorbed(stock, absorb="decode")
    for module in latent_modules(model):
        module.decode = kernel
    assert difference(decoded(model), decoded(stock)) <= 1e-5
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
    assert difference(decoded(model, cache), decoded(stock)) <= 1e-5
    assert set(kernel.calls) == set(CHUNKS[1:])


def test_training_and_prompts_are_stock_code(kernel: Counted) -> None:
    stock = stock_model("qwen3_moe", torch.float32)
    ids, mask = inputs(stock)
    losses = [
        model(input_ids=ids[:, :8], attention_mask=mask[:, :8], labels=ids[:, :8]).loss
        for model in (stock, decoding_model(stock, kernel))
    ]
    losses[1].backward()
    assert torch.equal(*losses)
    assert not kernel.calls


def test_a_module_without_a_config_is_refused(kernel: Counted) -> None:
    with pytest.raises(ValueError, match="no config"):
        decoding(nn.Linear(2, 2), kernel)
