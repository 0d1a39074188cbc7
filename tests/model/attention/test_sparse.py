"""Modules that attend sparsely: dense below the budget, the index that follows a cache, and models that decode."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from decoding_models import CHUNKS, LENGTH, absorbed, decoded, difference, inputs, latent_modules, stock_model
from kernel_layers import built
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from ktc.model.attention.absorbed import Absorption, absorb
from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.decoding import decoding
from ktc.model.attention.key_index import KeyIndex, index_of, keep_index
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.attention.sparse import Sparse
from ktc.model.attention.sparsity import Sparsity, Traffic, token_bytes
from ktc.model.decode_steps.growing_cache import growing
from ktc.model.decode_steps.step_memory import StepMemory
from ktc.model.kernels.attention_spec import AttentionSpec

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = AttentionSpec("sparse_attention", "fp32", "scalar")
FEW = Sparsity(4, 2, 4, "int4", shared=False)  # of the 35 positions of `decoded`
MANY = Sparsity(20, 2, 4, "int4", shared=False)


@pytest.fixture(scope="module")
def kernel() -> DecodeAttention:
    return DecodeAttention(built((SPEC,)).kernel(SPEC.entry), 2)


@pytest.fixture(scope="module")
def grouped() -> PreTrainedModel:
    return stock_model("qwen3_moe", torch.float32)


@pytest.fixture(scope="module")
def latent() -> PreTrainedModel:
    return stock_model("deepseek_v2", torch.float32)


def sparse_model(
    stock: PreTrainedModel, sparsity: Sparsity, decode: DecodeAttention | None, *, indexer: bool = False
) -> PreTrainedModel:
    model = copy.deepcopy(stock)
    sparse, found = Sparse(sparsity, decode, indexer), list(latent_modules(model))
    for module in found:
        of: Any = module
        sizes = LatentSizes(of.num_heads, of.qk_nope_head_dim, of.qk_rope_head_dim, of.v_head_dim, of.kv_lora_rank)
        absorb(module, Absorption(sizes, "kv_b_proj", "always", True), decode, sparse)
    if not found:
        for layer in model.model.layers:
            decoding(layer.self_attn, decode, sparse)
    return model


def modules(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def cache(model: PreTrainedModel) -> DynamicCache:
    return growing(DynamicCache(config=model.config))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_below_the_budget_it_is_dense_bit_for_bit(family: str, kernel: DecodeAttention) -> None:
    stock = stock_model(family, torch.float32)
    model = sparse_model(stock, Sparsity(LENGTH, 0, 0, "int4", shared=False), kernel)
    if family == "qwen3_moe":
        dense = copy.deepcopy(stock)
        for layer in dense.model.layers:
            decoding(layer.self_attn, kernel)
    else:
        dense = absorbed(stock, absorb="always")
        for module in latent_modules(dense):
            module.decode = kernel
    assert torch.equal(decoded(model, cache(model)), decoded(dense, cache(dense)))
    assert not any(module.traffic.dense for module in modules(model))


@pytest.mark.parametrize("index", ["int4", "sign"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_the_kernel_decodes_as_the_reference(family: str, index: Any, kernel: DecodeAttention) -> None:
    stock = stock_model(family, torch.float32)
    sparsity = Sparsity(4, 2, 4, index, shared=family == "deepseek_v2")
    first, logits, counted = list[Tensor](), list[Tensor](), list[Traffic]()
    for decode in (kernel, None):
        model, found = sparse_model(stock, sparsity, decode), list[Tensor]()
        # Of the first layer: after it a last bit may change a choice.
        modules(model)[0].register_forward_hook(lambda _, __, out, found=found: found.append(out[0]))
        logits.append(decoded(model, cache(model)))
        first.append(torch.cat(found, 1))
        counted.append(modules(model)[0].traffic)
    assert difference(*first) <= 1e-5
    assert difference(logits[0], decoded(stock)) > 1e-3, "it reads fewer positions"
    assert counted[0] == counted[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_the_bytes_of_a_step_are_counted(family: str, kernel: DecodeAttention) -> None:
    model = sparse_model(stock_model(family, torch.float32), FEW, kernel)
    held, _ = prefilled(model)
    config, module = model.config, modules(model)[0]
    if family == "qwen3_moe":
        sizes = config.num_attention_heads, config.num_key_value_heads, 2 * 4 * module.head_dim, module.head_dim
    else:
        width = config.kv_lora_rank + config.qk_rope_head_dim
        sizes = config.num_attention_heads, 1, 4 * width, width
    counted = FEW.traffic(25, *sizes)
    assert module.traffic == counted + counted, "of two sequences"
    index = index_of(held.layers[0])
    assert index is not None
    blocks = 2 * sizes[1] * 32 * token_bytes("int4", sizes[3])
    assert index.codes.blocks[:, :, :2].nbytes + index.codes.scales[:, :, :32].nbytes == blocks


def test_with_room_for_most_positions_it_is_near_dense_attention(grouped: PreTrainedModel) -> None:
    model = sparse_model(grouped, MANY, None)
    few = sparse_model(grouped, FEW, None)
    dense = decoded(grouped)
    assert difference(decoded(model), dense) < difference(decoded(few), dense)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_every_cache_has_the_same_logits(family: str, kernel: DecodeAttention) -> None:
    """Appended in place, concatenated, and static with a longer buffer: the index is the same."""
    stock = stock_model(family, torch.float32)
    model = sparse_model(stock, FEW, kernel)
    wanted = decoded(model, cache(model))
    assert torch.equal(decoded(model), wanted)
    assert difference(decoded(model, StaticCache(config=model.config, max_cache_len=LENGTH + 9)), wanted) <= 1e-5


def stepped(model: PreTrainedModel, held: DynamicCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=held, use_cache=True).logits


class Built:
    """Counts the indices that are made anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, of = 0, KeyIndex.of

        def counted(*args: Any) -> KeyIndex:
            self.count += 1
            return of(*args)

        monkeypatch.setattr(KeyIndex, "of", counted)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Built:
    return Built(monkeypatch)


def prefilled(model: PreTrainedModel, rows: int = 2) -> tuple[DynamicCache, Tensor]:
    ids = torch.randint(3, model.config.vocab_size, (rows, 30), generator=torch.Generator().manual_seed(9))
    held = cache(model)
    stepped(model, held, ids[:, :24])
    stepped(model, held, ids[:, 24:25])
    return held, ids


def rebuilt(model: PreTrainedModel, held: DynamicCache, ids: Tensor, mean_of: DynamicCache) -> Tensor:
    """The logits of a step over a copy of a cache whose index was made anew, around the same mean."""
    fresh = copy.deepcopy(held)
    for layer, other in zip(fresh.layers, mean_of.layers, strict=True):
        assert index_of(layer) is None, "a copy of a cache has no index"
        old = index_of(other)
        assert old is not None
        index = KeyIndex(old.format, type(old.codes)(old.codes.blocks[:, :, :0], old.codes.scales[:, :, :0]), old.mean)
        keep_index(layer, index)
    return stepped(model, fresh, ids)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_the_index_follows_crops_and_changes_of_the_batch(family: str, kernel: DecodeAttention, made: Built) -> None:
    model = sparse_model(stock_model(family, torch.float32), FEW, kernel)
    held, ids = prefilled(model)
    layers = len(held.layers)
    assert made.count == layers
    stepped(model, held, ids[:, 25:28])
    held.crop(-2)
    assert torch.equal(rebuilt(model, held, ids[:, 28:29], held), stepped(model, held, ids[:, 28:29]))
    held.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(rebuilt(model, held, ids[:, 29:30], held), stepped(model, held, ids[:, 29:30]))
    held.batch_repeat_interleave(2)
    held.batch_select_indices(torch.tensor([0, 3, 2]))
    ids = ids[[0, 1, 0]]
    assert torch.equal(rebuilt(model, held, ids[:, 5:6], held), stepped(model, held, ids[:, 5:6]))
    assert made.count == layers, "nothing was made anew"


def test_a_cache_that_others_changed_has_its_index_made_anew(
    grouped: PreTrainedModel, kernel: DecodeAttention, made: Built
) -> None:
    model = sparse_model(grouped, FEW, kernel)
    held, ids = prefilled(model)
    layers = len(held.layers)
    for layer in held.layers:
        layer.keys[:, :, 3] += 5  # in place: the tensor is the same, its version is not
    untouched = copy.deepcopy(held)
    assert torch.equal(stepped(model, held, ids[:, 25:26]), stepped(model, untouched, ids[:, 25:26]))
    assert made.count == 3 * layers
    for layer in held.layers:
        layer.keys, layer.values = layer.keys.flip(0), layer.values.flip(0)
    stepped(model, held, ids[:, 26:27])
    assert made.count == 4 * layers
    stepped(model, held, ids[:, 27:28])
    assert made.count == 4 * layers


def test_a_dense_call_between_leaves_the_index_behind_and_the_next_extends_it(
    grouped: PreTrainedModel, kernel: DecodeAttention, made: Built
) -> None:
    model = sparse_model(grouped, FEW, kernel)
    held, ids = prefilled(model)
    stepped(model, held, ids[:, :20])  # many tokens: dense
    assert torch.equal(rebuilt(model, held, ids[:, 25:26], held), stepped(model, held, ids[:, 25:26]))
    assert made.count == len(held.layers)


def test_left_padding_is_not_chosen(grouped: PreTrainedModel, kernel: DecodeAttention) -> None:
    """What is in the place of padding changes no bit, of the mean of keys neither."""
    model = sparse_model(grouped, FEW, kernel)
    ids, mask = inputs(model)
    other = torch.where(mask.bool(), ids, ids + 1)
    assert torch.equal(*(_last_logits(model, each, mask) for each in (ids, other)))


def _last_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    held = cache(model)
    with torch.no_grad():
        model(input_ids=ids[:, :30], attention_mask=mask[:, :30], past_key_values=held)
        return model(input_ids=ids[:, 30:31], attention_mask=mask[:, :31], past_key_values=held).logits


def test_tensors_of_inference_mode_stay_dense_and_a_line_says_so(
    grouped: PreTrainedModel, kernel: DecodeAttention, caplog: pytest.LogCaptureFixture
) -> None:
    model = sparse_model(grouped, FEW, kernel)
    dense = sparse_model(grouped, Sparsity(99, 0, 0, "int4", shared=False), kernel)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        assert torch.equal(decoded(model, cache(model)), decoded(dense, cache(dense)))
    assert "stays dense" in caplog.text


def test_a_captured_step_is_dense_without_reading_the_length(
    grouped: PreTrainedModel, kernel: DecodeAttention, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sparse_model(grouped, FEW, kernel)
    held, _ = prefilled(model)
    memory = StepMemory(held, held.layers[0].keys.shape[0], 256)
    memory.take(held)
    monkeypatch.setattr("ktc.model.attention.sparse.length_of", lambda _: pytest.fail("it waits for the GPU"))
    ids, mask = torch.full((memory.rows, 1), 5), torch.ones(memory.rows, 1, 1, 256, dtype=torch.bool)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        model(input_ids=ids, position_ids=ids, past_key_values=memory.cache, attention_mask=mask)
    assert "attention over `StepLayer` stays dense: its sparse attention keeps an index" in caplog.text


def test_a_trained_indexer_chooses_instead_of_an_index(kernel: DecodeAttention, made: Built) -> None:
    stock = stock_model("deepseek_v32", torch.float32)
    wanted = decoded(stock)
    for decode in (kernel, None):
        model = sparse_model(stock, FEW, decode, indexer=True)
        assert difference(decoded(model), wanted) <= 1e-5
        traffic = modules(model)[0].traffic
        assert traffic.index == 0
        assert traffic.gathered > 0
    assert made.count == 0
    assert stock.config.index_topk < LENGTH, "its choice leaves positions out"


def test_training_and_prompts_are_dense(grouped: PreTrainedModel, kernel: DecodeAttention) -> None:
    ids, mask = inputs(grouped)
    losses = [
        model(input_ids=ids, attention_mask=mask, labels=ids).loss
        for model in (grouped, sparse_model(grouped, FEW, kernel))
    ]
    assert torch.equal(*losses)
    assert max(CHUNKS) > 16


def prompts(model: PreTrainedModel) -> dict[str, Any]:
    ids, mask = inputs(model)
    return {"input_ids": ids[:2, :24], "attention_mask": mask[:2, :24]}


def generated(model: PreTrainedModel, given: dict[str, Any], held: DynamicCache, **options: Any) -> Tensor:
    return model.generate(**given, past_key_values=held, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_beams_of_padded_prompts_carry_the_index_along(
    family: str, kernel: DecodeAttention, made: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys centred by nothing, an index that is made anew in every step is the same."""
    monkeypatch.setattr("ktc.model.attention.key_index.mean_of", lambda keys, _: keys.new_zeros(keys[:, :, 0].shape))
    model = sparse_model(stock_model(family, torch.float32), FEW, kernel)
    found = generated(model, prompts(model), cache(model), num_beams=3)
    layers = model.config.num_hidden_layers
    assert made.count == layers
    wanted = generated(model, prompts(model), DynamicCache(config=model.config), num_beams=3)
    assert made.count > 3 * layers, "of stock layers, whose beams are copies"
    assert torch.equal(found, wanted)


def test_drafts_from_the_prompt_crop_the_cache_and_its_index(grouped: PreTrainedModel, kernel: DecodeAttention) -> None:
    model = sparse_model(grouped, FEW, kernel)
    given = {"input_ids": prompts(model)["input_ids"][:1]}
    given["input_ids"] = torch.cat([given["input_ids"], given["input_ids"]], 1)  # repeats itself
    drafted = generated(model, given, cache(model), prompt_lookup_num_tokens=3)
    assert torch.equal(drafted, generated(model, given, cache(model)))
