"""Small models that decode chunk by chunk or by `generate`, stock and with absorbed attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ktc.model import twin
from ktc.model.attention.absorbed import Absorption, absorb
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.hf.latent_cache import caches_latents
from ktc.stages.capture import open_model

CHUNKS = (20, 1, 1, 5, 8)
LENGTH = sum(CHUNKS)


def latent_modules(model: nn.Module) -> Iterator[nn.Module]:
    yield from (module for module in model.modules() if caches_latents(type(module)))


def absorbed(stock: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    """A copy of a model whose latent attention absorbs."""
    model = copy.deepcopy(stock)
    for module in latent_modules(model):
        of: Any = module
        sizes = LatentSizes(of.num_heads, of.qk_nope_head_dim, of.qk_rope_head_dim, of.v_head_dim, of.kv_lora_rank)
        absorb(module, Absorption(sizes, "kv_b_proj", **{"absorb": "always", "elide": True, **settings}))
    return model


def stock_model(name: str, dtype: torch.dtype = torch.float64, **sizes: int) -> PreTrainedModel:
    """Return a small model; `sizes` are settings of its config that differ."""
    config = open_model(f"tiny:{name}", fetch_weights=False).config
    for setting, size in sizes.items():
        setattr(config, setting, size)
    model = twin.build(config, 7, dtype, "cpu").eval()
    model.set_experts_implementation("eager")
    if "deepseek" in name and not any(latent_modules(model)):
        pytest.skip("this transformers caches expanded keys")
    return model


def inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Three sequences, two of them padded on the left."""
    ids = torch.randint(3, model.config.vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :9] = 0, 0
    return ids, mask


def decoded(model: PreTrainedModel, cache: Any = None) -> Tensor:
    """Logits of all tokens that are no padding, computed chunk by chunk with a cache."""
    ids, mask = inputs(model)
    cache, at, out = cache or DynamicCache(config=model.config), 0, list[Tensor]()
    with torch.no_grad():
        for chunk in CHUNKS:
            given = {"attention_mask": mask[:, : at + chunk], "past_key_values": cache, "use_cache": True}
            out.append(model(input_ids=ids[:, at : at + chunk], **given).logits)
            at += chunk
    return torch.cat(out, 1)[mask.bool()]


def generated(model: Any, rows: int = 2, **options: Any) -> Tensor:
    """Prompts of 9 tokens, all but the first padded on the left, with 24 greedy ones unless `options` say otherwise."""
    ids = torch.randint(3, model.config.vocab_size, (rows, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1:, :2] = 0
    return model.generate(
        ids, attention_mask=mask, pad_token_id=0, **{"max_new_tokens": 24, "do_sample": False} | options
    )


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
