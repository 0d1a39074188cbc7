"""Attention with sinks through PyTorch's fused attention: outputs and gradients are those of the eager code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss

from ktc.model import twin
from ktc.model.attention import sinks as sinks_module
from ktc.model.attention.sinks import NAME, attend, fused_sinks
from ktc.model.hf.private_api import attention_of

HEADS, GROUPS, WIDTH = 6, 3, 20


@pytest.mark.parametrize("mask_kind", ["none", "added", "bool"])
@pytest.mark.parametrize(("tokens", "length"), [(7, 7), (1, 33), (16, 16)])
def test_outputs_and_gradients_are_those_of_the_eager_code(mask_kind: str, tokens: int, length: int) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value = (
        random(2, HEADS, tokens, WIDTH),
        random(2, GROUPS, length, WIDTH),
        random(2, GROUPS, length, WIDTH),
    )
    sinks = random(HEADS)
    allowed = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens).expand(2, 1, -1, -1).clone()
    allowed[1, :, :, :3] = False  # as of padding on the left: such rows see the sink alone
    added = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    mask = {"none": None, "added": added, "bool": allowed}[mask_kind]
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    given: dict[str, Any] = {"scaling": WIDTH**-0.5, "dropout": 0.0}
    eager = modeling_gpt_oss.eager_attention_forward
    wanted, _ = eager(module, query, key, value, None if mask is None else added, **given)
    ours, _ = attend(module, query, key, value, mask, s_aux=sinks, **given)
    assert torch.allclose(ours, wanted, rtol=1e-6, atol=1e-7)
    direction = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    inputs = (query, key, value, sinks)
    for mine, theirs in zip(*(torch.autograd.grad(out, inputs, direction) for out in (ours, wanted)), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def model() -> nn.Module:
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=16, vocab_size=128,
        num_local_experts=4, intermediate_size=32, num_experts_per_tok=2, sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    made = GptOssForCausalLM(config)
    made.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    return made


def test_a_model_computes_the_same_with_padding_and_a_window() -> None:
    made = model()
    ids = torch.randint(1, 128, (3, 37), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    wanted = made(input_ids=ids, attention_mask=mask).logits
    with fused_sinks(made, "cpu") as fused:
        assert fused
        assert attention_of(made.config) == NAME
        ours = made(input_ids=ids, attention_mask=mask).logits
    assert attention_of(made.config) == "eager"
    assert torch.allclose(ours[mask == 1], wanted[mask == 1], rtol=1e-4, atol=1e-4)


def test_a_model_in_bf16_is_known_too() -> None:
    with fused_sinks(model().to(torch.bfloat16), "cpu") as fused:
        assert fused


def test_latent_attention_with_sinks_keeps_its_own_function() -> None:
    """Its modules have no width of heads of which an example could be made."""
    made = twin.build(twin.shrink(twin.default_config("hy_v4")), 7, torch.float32, "cpu")
    assert attention_of(made.config) == "eager" and any(hasattr(module, "sinks") for module in made.modules())
    with fused_sinks(made, "cpu") as fused:
        assert not fused


def test_a_module_that_computes_something_else_keeps_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    with fused_sinks(model()) as fused:
        assert not fused, "there is no GPU in it"
    eager = modeling_gpt_oss.eager_attention_forward

    def capped(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return eager(module, torch.tanh(query), *args, **kwargs)

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel for it on this device")

    for function in (capped, failing):
        monkeypatch.setattr(sinks_module, "eager_function", lambda stock, function=function: function)
        with fused_sinks(model(), "cpu") as fused:
            assert not fused
