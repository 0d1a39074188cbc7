"""Assisted decoding and prompt lookup of transformers give a compiled model's greedy tokens, in fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ktc
from ktc.foundation import versions

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 40
PROMPT = [5, 9, 33, 60, 5, 9, 33, 60, 5, 9]
needs_lookup = pytest.mark.skipif(
    versions.release(versions.installed("transformers") or "0") < (5, 7),
    reason="prompt lookup of transformers 5.6 fails where the end of sequence is None",
)


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
    prompt = torch.tensor([PROMPT])
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


@needs_lookup
def test_prompt_lookup_gives_the_greedy_tokens(model: Any) -> None:
    wanted, calls = generated(model)
    found, fewer = generated(model, prompt_lookup_num_tokens=3)
    assert found == wanted
    assert fewer <= calls


# Programs for steps, the decode kernel, and latents that are absorbed; caches of bf16 and of codes.
CASES = [
    ("olmoe", "auto", 0.03),
    ("deepseek_v2", "auto", 0.03),
    pytest.param("olmoe", "int8", 0.06, marks=pytest.mark.slow),
    pytest.param("deepseek_v2", "int8", 0.06, marks=pytest.mark.slow),
]


@needs_lookup
@pytest.mark.parametrize(("family", "kv", "rounding"), CASES)
def test_models_for_inference_choose_the_likeliest_tokens_too(
    inference_twin: Callable[..., Path], family: str, kv: str, rounding: float
) -> None:
    out = inference_twin(family) if kv == "auto" else inference_twin(family, kv=kv)
    model, twin = (ktc.load(out).eval() for _ in range(2))
    assert (model.decode_graphs is None) == (kv == "int8")  # steps over codes are eager
    for how in ({"assistant_model": twin}, {"prompt_lookup_num_tokens": 3}):
        tokens, calls = generated(model, **how)
        assert calls <= 0.9 * NUM_TOKENS
        assert most_behind(model, tokens) <= rounding


def most_behind(model: Any, tokens: list[int]) -> float:
    """How far a token's score is below the highest, in one pass over all tokens, relative to the highest there is."""
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(PROMPT) - 1 : -1].float()
    behind = scores.amax(-1) - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(behind.max() / scores.abs().max())
