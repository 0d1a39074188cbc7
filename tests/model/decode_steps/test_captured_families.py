"""Which families of the census have decoding steps that are captured, and why the others have none.

On a GPU a step is captured as a CUDA graph. Without one it is recorded and computed again, which shows the kind of a
family's cache and not operations that a capture forbids.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from recorded_steps import eager_graphs
from torch import Tensor
from transformers import DynamicCache

from ktc.model import twin
from ktc.model.decode_steps.cuda_graph import DecodeGraphs
from ktc.model.experts.host.beside import SideStream

ON_GPU: Final = torch.cuda.is_available()
DEVICE: Final = "cuda:0" if ON_GPU else "cpu"
INDEXED, LINEAR = "DynamicIndexedLayer", "LinearAttentionLayer"
EAGER: Final = {  # by the kind of a layer of their cache
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), INDEXED),
    **dict.fromkeys(
        (
            "bailing_hybrid", "jamba", "kimi_linear", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text", "qwen3_next",
            "qwen4_exp_text",
        ),
        LINEAR,
    ),
    **dict.fromkeys(("inkling_text", "inkling2_text"), "LinearAttentionAndSlidingWindowAttentionLayer"),
    "zaya": "LinearAttentionAndFullAttentionLayer",
    "deepseek_v4": "DeepseekV4HCACache",
}  # fmt: skip
LOOPED: Final = frozenset({"aria_text", "jetmoe", "longcat_flash"})  # stock experts that wait for the GPU
OWN_CACHES: Final = frozenset({"granitemoehybrid", "minimax"})  # no step on a `DynamicCache` without their own layers


def decoded(model: Any, step: Callable[..., Any]) -> Tensor:
    """The logits of three steps after a prompt of two sequences, one padded on the left."""
    ids = torch.randint(3, min(90, model.config.get_text_config().vocab_size), (2, 11),
                        generator=torch.Generator().manual_seed(1)).to(DEVICE)  # fmt: skip
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions, cache, steps = (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache(config=model.config), list[Tensor]()
    with torch.no_grad():
        model(input_ids=ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], past_key_values=cache,
              use_cache=True)  # fmt: skip
        for at in range(8, 11):
            out = step(
                input_ids=ids[:, at : at + 1], attention_mask=mask[:, : at + 1],
                position_ids=positions[:, at : at + 1], past_key_values=cache, use_cache=True, return_dict=True,
            )  # fmt: skip
            steps.append(out.logits[:, -1].float())
    return torch.stack(steps)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*twin.moe_families()} - OWN_CACHES))
def test_a_step_is_captured_or_its_cache_is_the_reason(family: str, caplog: pytest.LogCaptureFixture) -> None:
    config = twin.shrink(twin.default_config(family))
    config.dtype = torch.float32
    model = twin.build(config, 7, torch.float32, DEVICE).eval()
    model.set_experts_implementation("batched_mm")
    graphs = DecodeGraphs() if ON_GPU else eager_graphs(SideStream)
    stock = decoded(model, model)
    with caplog.at_level(logging.WARNING):
        stepped = decoded(model, lambda **inputs: graphs.step(model, **inputs))
    assert float((stepped - stock).norm() / stock.norm()) <= 1e-4
    told = [record.getMessage() for record in caplog.records if "L451" in record.getMessage()]
    if family in EAGER:
        assert f"a layer of the cache is a `{EAGER[family]}`" in told[0]
    elif family in LOOPED and ON_GPU:
        assert "captur" in told[0]
    else:
        assert not told
