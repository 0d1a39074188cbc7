"""Caches of int8 codes: what stock code does to keys and values, and models that decode over codes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_reference import INT8_QUICK
from decoding_models import CHUNKS, absorbed, decoded, difference, latent_modules, stock_model
from kernel_layers import built
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktc.diagnostics import InputRefused
from ktc.model.attention.decoding import decoding
from ktc.model.attention.int8_decode import Int8DecodeAttention
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.decode_steps.growing_cache import growing
from ktc.model.decode_steps.int8_cache import Int8Layer, as_int8, int8_kernels
from ktc.model.kernels.kernel_library import Kernel

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = 0.05  # of logits of tiny random models, by codes of 8 bits and the experts that are then chosen


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return built(INT8_QUICK).kernel(INT8_QUICK[-1].entry)


@pytest.fixture(scope="module")
def model(kernel: Kernel) -> PreTrainedModel:
    return over_codes(stock_model("qwen3_moe", torch.float32), kernel)


def over_codes(stock: PreTrainedModel, kernel: Kernel) -> PreTrainedModel:
    if any(latent_modules(stock)):
        model = absorbed(stock, absorb="decode")
        for module in latent_modules(model):
            module.decode = Int8DecodeAttention(kernel, 2)
        return model
    model = copy.deepcopy(stock)
    for layer in model.model.layers:
        decoding(layer.self_attn, Int8DecodeAttention(kernel, 2))
    return model


def cache_of(model: PreTrainedModel) -> DynamicCache:
    return growing(as_int8(DynamicCache(config=model.config), int8_kernels(model)))


def filled(kernel: Kernel, tokens: int = 40) -> Int8Layer:
    layer = Int8Layer(kernel)
    draw = torch.Generator().manual_seed(8)
    for each in (tokens, 1, 3):
        layer.update(*(torch.randn(3, 2, each, 16, generator=draw) for _ in range(2)))
    return layer


# Prompts with padding on the left, single tokens and chunks of a few; windows keep their numbers (gpt_oss).
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_model_decodes_over_codes(family: str, kernel: Kernel) -> None:
    stock = stock_model(family, torch.float32)
    model = over_codes(stock, kernel)
    cache = cache_of(model)
    found, wanted = decoded(model, cache), decoded(stock)
    assert 0 < difference(found, wanted) <= ROUNDING
    held = [layer for layer in cache.layers if isinstance(layer, Int8Layer)]
    assert len(held) == sum(not layer.is_sliding for layer in cache.layers) > 0
    assert all(isinstance(layer.keys, Int8Tensor) and layer.get_seq_length() == sum(CHUNKS) for layer in held)


def test_a_prompt_is_read_with_its_own_keys_as_they_are(kernel: Kernel) -> None:
    layer = Int8Layer(kernel)
    draw = torch.Generator().manual_seed(9)
    first, second = (torch.randn(1, 2, 20, 16, generator=draw) for _ in range(2))
    keys, values = layer.update(first, first)
    assert torch.equal(keys, first)
    keys, values = layer.update(second, second)
    assert torch.equal(keys[:, :, 20:], second)
    assert torch.equal(keys[:, :, :20], Int8Tensor.of(first).decoded())
    assert torch.equal(keys, values)


def test_codes_are_appended_in_place_and_take_half_of_the_bytes(kernel: Kernel) -> None:
    layer = filled(kernel)
    at = layer.keys.codes.data_ptr()
    layer.update(torch.randn(3, 2, 1, 16), torch.randn(3, 2, 1, 16))
    assert layer.keys.codes.data_ptr() == at
    assert layer.keys.nbytes == 3 * 2 * 45 * (16 + 4)


CHANGES = {
    "crop": lambda layer: layer.crop(-7),
    "beams": lambda layer: layer.reorder_cache(torch.tensor([2, 0, 2])),
    "repeats": lambda layer: layer.batch_repeat_interleave(2),
    "selection": lambda layer: layer.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_stock_code_changes_stays_codes(change: str, kernel: Kernel) -> None:
    layer = filled(kernel)
    stock = DynamicCache().layer_class_to_replicate()
    stock.update(*(each.decoded().clone() for each in (layer.keys, layer.values)))
    for each in (layer, stock):
        CHANGES[change](each)
    assert isinstance(layer.keys, Int8Tensor)
    for found, wanted in ((layer.keys, stock.keys), (layer.values, stock.values)):
        assert torch.equal(found.decoded(), wanted)
    batch = layer.keys.shape[0]
    new = torch.randn(batch, 2, 1, 16)
    keys, _ = layer.update(new, new)
    assert torch.equal(keys.decoded()[:, :, :-1], stock.keys)
    assert torch.equal(copy.deepcopy(layer).keys.codes, keys.codes)


def test_any_other_operation_reads_numbers_and_none_writes() -> None:
    numbers = torch.randn(1, 2, 5, 8)
    held = Int8Tensor.of(numbers)
    assert difference(held + 0, numbers) <= 1e-2
    assert torch.equal(torch.cat([held, held], 2), torch.cat([held.decoded()] * 2, 2))
    assert torch.equal(held.transpose(1, 2), held.decoded().transpose(1, 2))
    assert torch.equal(held[..., :3], held.decoded()[..., :3])
    assert isinstance(held[:, :1], Int8Tensor)
    with pytest.raises(NotImplementedError, match="write into the codes"):
        held.mul_(2)


def test_generation_searches_beams_over_codes(model: PreTrainedModel) -> None:
    ids = torch.randint(3, model.config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    for beams in (1, 3):
        cache = cache_of(model)
        found = model.generate(ids, past_key_values=cache, num_beams=beams, **options)
        assert found.shape[0] == 2
        assert isinstance(cache.layers[0].keys, Int8Tensor)
    # A row reads the same codes alone and beside a longer one that is padded.
    greedy = model.generate(ids, past_key_values=cache_of(model), **options)
    alone = model.generate(ids[1:, 2:], past_key_values=cache_of(model), **{**options, "attention_mask": mask[1:, 2:]})
    assert torch.equal(greedy[1, 6:], alone[0, 4:])


def test_gradients_are_refused(kernel: Kernel) -> None:
    new: Tensor = torch.randn(1, 2, 3, 16, requires_grad=True)
    with pytest.raises(InputRefused, match="L454"):
        Int8Layer(kernel).update(new, new)
