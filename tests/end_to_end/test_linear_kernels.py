"""`kt_linear(gemv)` on a whole model: compiled, loaded, and generating with the kernel, also under an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import gguf_twins
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from peft import get_peft_model
from transformers import AutoConfig

import ktc
from ktc.compiler import analyse
from ktc.model import twin
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.linears.lora_linear import KTLinear
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.loading.peft_glue import read_lora_config
from ktc.stages.plan import Plan

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


DECODE = """
import "std/moe.ktr"
rule experts { match moe.block => cpu_moe() }
rule decode  { match linear at "**.self_attn.*", "lm_head" => kt_linear(gemv) }
"""


def test_linear_layers_of_a_gguf_file_are_multiplied_as_they_are_stored(tmp_path: Path) -> None:
    """Attention and head stay in blocks, the plan counts and tells it, and generation is the reference's."""
    written = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=Type.Q8_0, rest=Type.Q8_0)
    (tmp_path / "decode.ktr").write_text(DECODE)
    plans: list[Plan] = []
    out = ktc.compile(
        written.folder, tmp_path / "decode.ktr", tmp_path / "out",
        observe=lambda stage, value: plans.append(cast("Plan", value)) if stage == "plan" else None,
    )  # fmt: skip
    told = {reason.path for reason in plans[0].reasons if reason.text == "stored as q8_0, multiplied as stored"}
    assert "lm_head" in told and any(path.startswith("model.layers.[0..1].self_attn.") for path in told)
    model, reference = ktc.load(out), ktc.load(out, reference=True)
    stored = {name for name, module in model.named_modules() if isinstance(module, StoredLinear)}
    assert {"lm_head", "model.layers.1.self_attn.q_proj"} <= stored and len(stored) == 9
    assert not any(isinstance(module, StoredLinear) for module in reference.modules())
    ids = torch.arange(4, 16)[None]
    exact = written.model(input_ids=ids).logits
    for tokens in (ids, ids[:, :1]):
        ours, stock = (each(input_ids=tokens).logits.float() for each in (model, reference))
        assert float((ours - stock).norm() / stock.norm()) < 3e-2
    assert float((reference(input_ids=ids).logits - exact).norm() / exact.norm()) < 1e-5
    assert all(finding.state == "good" for finding in ktc.verify(out))


def test_a_program_that_trains_or_asks_for_pytorch_keeps_plain_weights(tmp_path: Path) -> None:
    folder = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=Type.Q8_0, rest=Type.Q8_0).folder
    attention = 'rule a { match linear at "**.self_attn.*" => kt_linear(gemv%s) }\n'
    tuned = 'rule t { match linear at "**.q_proj" => lora_linear(rank = 4) }\n'
    for number, (program, stays) in enumerate(
        (
            (attention % "", True),
            (attention % ", prefill = auto", True),
            (attention % ", prefill = torch", False),
            (attention % "" + tuned, False),
            (attention % "" + "plan { mode = train }\n", False),
        )
    ):
        rules = tmp_path / f"{number}.ktr"
        rules.write_text(program)
        plan = analyse(folder, rules).plan
        assert any(isinstance(spec, PackedLinearSpec) for spec in plan.kernels) == stays, program
