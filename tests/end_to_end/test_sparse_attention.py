"""A compiled model with `sparse_attention`: dense up to the budget, bit for bit, and beyond it fewer bytes are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_answers import Answers, alone, config_of
from torch import Tensor

import ktc
from ktc.cli import app as cli
from ktc.foundation.host import find_compiler
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.request import Limits, Request
from ktc.model.attention.reads import counters, reads_since
from ktc.model.attention.sparsity import Sparsity, Traffic

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


def expected_traffic(model: Any, first: int, last: int) -> Traffic:
    """Return the bytes of one layer in steps over `first` to `last` positions."""
    config, module = model.config, attention(model)[1]
    element = torch.finfo(model.dtype).bits // 8
    latent = getattr(config, "kv_lora_rank", 0)
    width = latent + config.qk_rope_head_dim if latent else module.head_dim
    key_heads = 1 if latent else config.num_key_value_heads
    sizes = config.num_attention_heads, key_heads, element * (width if latent else 2 * width), width
    steps = (SPARSITY.traffic(positions, *sizes) for positions in range(first, last + 1))
    return sum(steps, Traffic(0, 0, 0))


def test_the_bytes_of_every_step_beyond_the_budget_are_counted(compiled_sparse: Path) -> None:
    model = loaded(compiled_sparse)
    before = counters(model)
    logits(model)
    first, second, *_ = (module.traffic for module in attention(model))
    assert first == Traffic(0, 0, 0)
    assert second == expected_traffic(model, SPARSITY.budget + 1, PROMPT + NEW - 1)
    assert second.ratio > 1.5
    reads, layers = reads_since(model, before), len(attention(model)) - 1
    assert reads is not None
    assert (reads.layers, reads.tokens) == (layers, PROMPT + NEW - 1 - SPARSITY.budget)
    assert reads.dense_bytes_per_token == pytest.approx(layers * second.dense / reads.tokens)
    assert reads.bytes_per_token == pytest.approx(layers * (second.index + second.gathered) / reads.tokens)


def test_ktc_generate_reports_the_bytes_per_token(compiled_sparse: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> tuple[str, str]:
        asked = ("generate", str(compiled_sparse), "--prompt", "Hello", "--raw", "--max-new-tokens", *options)
        assert cli.main(list(asked)) == 0
        return capfd.readouterr()

    found = json.loads(run("40", "--json")[0])
    reads, positions = found["sparse_attention"], found["prompt_tokens"] + found["new_tokens"] - 1
    assert found["prompt_tokens"] <= SPARSITY.budget < positions
    of_layer = expected_traffic(loaded(compiled_sparse), SPARSITY.budget + 1, positions)
    assert reads["tokens"] == of_layer.tokens
    assert reads["dense_bytes_per_token"] == pytest.approx(reads["layers"] * of_layer.dense / of_layer.tokens)
    assert f"dense {reads['dense_bytes_per_token'] / 1e6:.3f} MB" in run("40")[1]
    assert "every step was short enough to be dense" in run("1")[1]


def test_rows_of_a_running_batch_are_answered_as_alone_and_counted(compiled_sparse: Path) -> None:
    model, answers = loaded(compiled_sparse), Answers()
    config, asked = config_of(model), {"short": (PROMPT, 4), "long": (40, 12), "longer": (70, 20), "late": (33, 9)}
    prompts = {name: tuple(range(7, 7 + length)) for name, (length, _) in asked.items()}
    wanted = {name: alone(model, prompts[name], config, count) for name, (_, count) in asked.items()}
    before, module = counters(model), attention(model)[1]
    alone_traffic = module.traffic
    engine = Engine(ModelRunner(model), Limits(batch=3), answers)
    engine.start()
    for name, (_, count) in asked.items():
        engine.submit(Request(name, prompts[name], count, config))
    assert {name: answers.wait(name)[0] for name in asked} == wanted
    engine.stop()
    reads = reads_since(model, before)
    assert reads is not None
    # Rows up to the budget beside longer ones are counted too, without an index.
    assert (module.traffic - alone_traffic).index == alone_traffic.index
    assert reads.bytes_per_token < reads.dense_bytes_per_token
