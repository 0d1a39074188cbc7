"""`kt_linear(gemv)` on a whole model: compiled, loaded, and generating with the kernel, also under an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig

import ktc
from ktc import twin
from ktc.linears.lora_linear import KTLinear
from ktc.model.peft_glue import read_lora_config

PROGRAM = """
import "std/moe.ktr"
import "std/attention.ktr" as attn

rule experts   { match moe.block => cpu_moe() }
rule attention { match attn.gqa as a => lora_linear on a.q, a.k, a.v, a.o }
rule decode    { match linear at "**.self_attn.*", "lm_head" => kt_linear(gemv) }
lora { rank = 4  alpha = 8  dropout = 0 }
"""
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_model_decodes_by_the_kernel_and_says_what_pytorch_does(tmp_path: Path) -> None:
    (tmp_path / "decode.ktr").write_text(PROGRAM)
    out = ktc.compile("tiny:qwen3_moe", tmp_path / "decode.ktr", tmp_path / "decoding_twin")
    model = get_peft_model(ktc.load(out), read_lora_config(out)).eval()
    linears = [module for module in model.modules() if isinstance(module, KTLinear)]
    assert len(linears) > 4
    head = model.get_output_embeddings()
    assert isinstance(head, KTLinear) and head.decode is not None  # it is outside every block
    ids = torch.randint(3, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(input_ids=ids).logits[:, -1].float()  # 12 rows: PyTorch's product
        cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        one = model(input_ids=ids[:, -1:], past_key_values=cache).logits[:, -1].float()  # one row: the kernel
    assert float((one - whole).norm() / whole.norm()) < 2e-2
    tokens = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert tokens.shape[1] <= 18


def test_a_program_may_ask_for_linear_kernels_alone(tmp_path: Path) -> None:
    (tmp_path / "decode.ktr").write_text('rule decode { match linear at "**.self_attn.*" => kt_linear(gemv) }\n')
    out = ktc.compile("tiny:qwen3_moe", tmp_path / "decode.ktr", tmp_path / "attention_twin")
    model = ktc.load(out).eval()
    assert {module.decode is not None for module in model.modules() if isinstance(module, KTLinear)} == {True}
    ids = torch.full((1, 1), 5)
    with torch.no_grad():
        ours, stock = (each(input_ids=ids).logits.float() for each in (model, ktc.load(out, reference=True)))
    assert float((ours - stock).norm() / stock.norm()) < 2e-2


def test_a_head_that_is_tied_to_the_embeddings_takes_the_kernel_and_stays_tied(tmp_path: Path) -> None:
    """The embedding is looked up in the weight that the kernel multiplies."""
    config = AutoConfig.from_pretrained(twin.write("qwen3_moe", tmp_path / "models"))
    config.tie_word_embeddings = True
    model = twin.build(config, seed=0, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "tied")
    (tmp_path / "head.ktr").write_text('rule head { match linear at "lm_head" => kt_linear(gemv) }\n')
    loaded = ktc.load(ktc.compile(tmp_path / "tied", tmp_path / "head.ktr", tmp_path / "out"))
    head = loaded.get_output_embeddings()
    assert isinstance(head, KTLinear) and head.decode is not None
    assert head.weight is loaded.get_input_embeddings().weight
    with torch.no_grad():
        ours, stock = (each(input_ids=torch.full((1, 1), 5)).logits.float() for each in (loaded, model))
    assert float((ours - stock).norm() / stock.norm()) < 2e-2
