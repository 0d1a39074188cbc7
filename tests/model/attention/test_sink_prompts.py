"""Prompts with sinks in blocks of rows: the stock function's output for every mask, and no scores of all tokens."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_models import stock_model
from torch import Tensor
from transformers import PreTrainedModel, StaticCache
from transformers.models.gpt_oss import modeling_gpt_oss

from ktc.model.attention import decoding as attention
from ktc.model.attention import sink_prompts
from ktc.model.attention.decoding import decoding, fuse_sink_prompts
from ktc.model.attention.sink_prompts import attend_in_blocks, computes_prompts

HEADS, GROUPS, WIDTH = 6, 3, 20
EAGER = modeling_gpt_oss.eager_attention_forward


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_prompts, "BLOCK", 8)
    monkeypatch.setattr(sink_prompts, "COPIES", 9000)  # one key head at a time, of the longer examples


def operands(tokens: int, length: int, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    query, key, value = (
        torch.randn(2, heads, rows, WIDTH, generator=generator).to(dtype)
        for heads, rows in ((HEADS, tokens), (HEADS // GROUPS, length), (HEADS // GROUPS, length))
    )
    sinks = torch.randn(HEADS, generator=generator).to(dtype)
    return SimpleNamespace(num_key_value_groups=GROUPS, sinks=sinks, training=False), query, key, value, sinks


def frobenius(ours: Tensor, wanted: Tensor) -> float:
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("tokens", "length"), [(21, 21), (17, 40)])
def test_blocks_compute_what_the_eager_function_does(
    tokens: int, length: int, window: int | None, dtype: torch.dtype, bound: float
) -> None:
    module, query, key, value, sinks = operands(tokens, length, dtype)
    seen = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    seen = seen if window is None else seen.triu(length - tokens - window + 1)
    seen = seen.expand(2, 1, -1, -1).clone()
    seen[1, :, :, :9] = False  # padding on the left: some rows see the sink alone
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    given: dict[str, Any] = {"scaling": WIDTH**-0.5}
    wanted = EAGER(module, query, key, value, added, **given)[0]
    for mask in (added, seen):
        assert frobenius(attend_in_blocks(query, key, value, mask, s_aux=sinks, **given), wanted) <= bound
    alone = EAGER(module, query[:1], key[:1], value[:1], added[:1], **given)[0]
    ours = attend_in_blocks(query[:1], key[:1], value[:1], None, s_aux=sinks, window=window, **given)
    assert frobenius(ours, alone) <= bound


def test_a_block_multiplies_the_keys_that_its_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    _, query, key, value, sinks = operands(24, 24, torch.float32)
    lengths = list[int]()
    stock = sink_prompts.attend

    def counted(of: Any, query: Tensor, key: Tensor, *more: Any, **settings: Any) -> Any:
        lengths.append(key.shape[2])
        return stock(of, query, key, *more, **settings)

    monkeypatch.setattr(sink_prompts, "attend", counted)
    monkeypatch.setattr(sink_prompts, "COPIES", 1 << 20)
    seen = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    for mask, window, expected in (
        (seen, None, [8, 16, 24]), (seen.triu(-3), None, [8, 11, 11]), (None, None, [8, 16, 24]), (None, 4, [8, 11, 11])
    ):  # fmt: skip
        lengths.clear()
        attend_in_blocks(query[:1], key[:1], value[:1], mask, scaling=1.0, s_aux=sinks, window=window)
        assert lengths == expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_was_changed_is_read_again(mode: Any) -> None:
    _, query, key, value, sinks = operands(24, 24, torch.float32)
    with mode():
        mask = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril().triu(-3)
        attend_in_blocks(query, key, value, mask, scaling=1.0, s_aux=sinks)
        mask.copy_(torch.ones_like(mask).tril())
        ours = attend_in_blocks(query, key, value, mask, scaling=1.0, s_aux=sinks)
        wanted = attend_in_blocks(query, key, value, mask.clone(), scaling=1.0, s_aux=sinks)
    assert torch.equal(ours, wanted)


def answering(stock: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(stock)
    for layer in model.model.layers:
        decoding(layer.self_attn, None)
    fuse_sink_prompts(model, stock.dtype)
    return model


@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_a_model_reads_prompts_without_scores(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stock_model("gpt_oss", torch.float32)
    model = answering(stock)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, int(stock.config.vocab_size), (3, 37), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0

    def logits(of: PreTrainedModel) -> Tensor:
        given = {"dynamic": None, "static": StaticCache(config=of.config, max_cache_len=50)}.get(cache)
        with torch.no_grad():
            first = of(input_ids=ids[:, :20], attention_mask=mask[:, :20], past_key_values=given, use_cache=True)
            kept = first.past_key_values if cache != "none" else None
            if kept is None:
                return of(input_ids=ids, attention_mask=mask).logits
            return of(input_ids=ids[:, 20:], attention_mask=mask, past_key_values=kept).logits

    wanted = logits(stock)
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", None)  # nothing calls it any more
    for layer in model.model.layers:
        assert layer.self_attn.sink_blocks
    ours = logits(model)
    assert torch.isfinite(ours).all()
    assert frobenius(ours, wanted) <= 1e-5


def test_training_and_weights_keep_stock_code() -> None:
    stock = stock_model("gpt_oss", torch.float32)
    model = answering(stock)
    ids = torch.randint(1, int(stock.config.vocab_size), (1, 30), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)
    with torch.no_grad():
        assert model(input_ids=ids, output_attentions=True).attentions[0] is not None


@pytest.mark.parametrize("planned", [True, False])
def test_a_device_whose_blocks_disagree_is_told_where_the_plan_has_them(
    planned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = answering(stock_model("gpt_oss", torch.float32)).to("meta")  # as a GPU
    monkeypatch.setattr(sink_prompts, "_agrees", lambda *of: planned and of[-1].type == "cpu")
    attention._tell_of_scores.cache_clear()
    fuse_sink_prompts(model, torch.float32)
    assert not any(layer.self_attn.sink_blocks for layer in model.model.layers)
    assert ["L468" in message and "`meta`" in message for message in caplog.messages] == [True] * planned


def test_modules_of_other_kinds_keep_their_function(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stock_model("gpt_oss", torch.float32).model.layers[0].self_attn
    assert computes_prompts(made, torch.float32)
    other = type("OtherAttention", (type(made),), {"forward": lambda self, x: eager_attention_forward(self, x)})
    module = copy.copy(made)
    module.__class__ = other
    assert not computes_prompts(module, torch.float32)
    assert not computes_prompts(stock_model("qwen3_moe", torch.float32).model.layers[0].self_attn, torch.float32)


def eager_attention_forward(module: Any, query: Tensor) -> Tensor:
    return query
