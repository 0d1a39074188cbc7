"""Assisted decoding and prompt lookup of transformers give a compiled model's greedy tokens, in fewer calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ktc
from ktc import versions

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model(compiled: Path) -> Any:
    return ktc.load(compiled, reference=True).eval()


@pytest.fixture(scope="module")
def assistants(model: Any, compiled: Path) -> dict[str, Any]:
    """Assistants that are always right, mostly wrong, and stock code without a compiled part."""
    wrong = ktc.load(compiled, reference=True).eval()
    nn.init.normal_(wrong.lm_head.weight, std=0.02, generator=torch.Generator().manual_seed(1))
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    stock: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "llama", vocab_size=model.config.vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    ))  # fmt: skip
    return {"itself": model, "compiled": wrong, "stock": stock.eval()}


def generated(model: Any, **how: Any) -> tuple[list[int], int]:
    """The tokens, and the number of calls of the model."""
    prompt = torch.tensor([[5, 9, 33, 60, 5, 9, 33, 60, 5, 9]])
    calls = list[int]()
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0, **how,
        )  # fmt: skip
    finally:
        hook.remove()
    return found[0, prompt.shape[1] :].tolist(), len(calls)


@pytest.mark.parametrize("assistant", ["itself", "compiled", "stock"])
def test_assisted_decoding_gives_the_greedy_tokens(model: Any, assistants: dict[str, Any], assistant: str) -> None:
    wanted, calls = generated(model)
    assert len(wanted) == calls == NUM_TOKENS
    assert generated(model, assistant_model=assistants[assistant])[0] == wanted


def test_a_right_assistant_saves_calls(model: Any, compiled: Path) -> None:
    twin = ktc.load(compiled, reference=True).eval()
    wanted, calls = generated(model)
    found, fewer = generated(model, assistant_model=twin)
    assert found == wanted
    assert fewer <= calls / 2


@pytest.mark.skipif(
    versions.release(versions.installed("transformers") or "0") < (5, 7),
    reason="prompt lookup of transformers 5.6 fails where the end of sequence is None",
)
def test_prompt_lookup_gives_the_greedy_tokens(model: Any) -> None:
    wanted, calls = generated(model)
    found, fewer = generated(model, prompt_lookup_num_tokens=3)
    assert found == wanted
    assert fewer <= calls
