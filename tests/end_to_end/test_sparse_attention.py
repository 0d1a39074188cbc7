"""A compiled model with `sparse_attention`: dense up to the budget, bit for bit, and beyond it fewer bytes are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ktc
from ktc.attention.sparsity import Sparsity, Traffic
from ktc.host import find_compiler

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]
SPARSITY = Sparsity(4, 2, 6, "int4", shared=True)
RULE = """import "std/attention.ktr" as attn
rule long {{ match attn.{} => sparse_attention(k = 4, sink = 2, local = 6, dense_layers = 1, choice = group) }}
"""
PROMPT, NEW = 5, 60


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
def compiled_sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    program = folder / "long.ktr"
    program.write_text(RULE.format("gqa" if request.param == "qwen3_moe" else "mla"))
    return ktc.compile(f"tiny:{request.param}", program, folder / f"e2e_sparse_{request.param}")


def loaded(out: Path, *, dense: bool = False, reference: bool = False) -> Any:
    """Return the model; `dense` leaves its kernels and takes the choice of positions away."""
    model: Any = ktc.load(out, reference=reference)
    if dense:
        for module in attention(model):
            module.sparse = None
    return model


def attention(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def logits(model: Any) -> Tensor:
    """Return the logits (NEW, V) of greedy tokens: row t was computed over PROMPT + t positions."""
    prompt = torch.arange(PROMPT)[None] + 7
    found = model.generate(
        prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return torch.cat(found.logits)


def test_up_to_the_budget_it_is_dense_bit_for_bit_and_beyond_it_reads_less(compiled_sparse: Path) -> None:
    sparse = loaded(compiled_sparse)
    assert [module.sparse and module.sparse.sparsity for module in attention(sparse)] == [
        None if module.layer_idx == 0 else SPARSITY for module in attention(sparse)
    ]
    found, wanted = logits(sparse), logits(loaded(compiled_sparse, dense=True))
    last_dense = SPARSITY.budget - PROMPT + 1
    assert torch.equal(found[:last_dense], wanted[:last_dense])
    assert not torch.equal(found[last_dense], wanted[last_dense])


def test_the_bytes_of_every_step_beyond_the_budget_are_counted(compiled_sparse: Path) -> None:
    model = loaded(compiled_sparse)
    logits(model)
    first, second, *_ = (module.traffic for module in attention(model))
    config, module = model.config, attention(model)[1]
    element = torch.finfo(model.dtype).bits // 8
    latent = getattr(config, "kv_lora_rank", 0)
    width = latent + config.qk_rope_head_dim if latent else module.head_dim
    key_heads = 1 if latent else config.num_key_value_heads
    row_bytes = element * (width if latent else 2 * width)
    expected = Traffic(0, 0, 0)
    for positions in range(SPARSITY.budget + 1, PROMPT + NEW):
        expected += SPARSITY.traffic(positions, config.num_attention_heads, key_heads, row_bytes, width)
    assert first == Traffic(0, 0, 0)
    assert second == expected
    assert second.ratio > 1.5
