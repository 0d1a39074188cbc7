"""Twins: small, seeded, and telling: what a twin must be able to show is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ktc.diagnostics import InputRefused
from ktc.model import twin

pytestmark = pytest.mark.usefixtures("one_thread")


def test_shrunk_deepseek_v3_keeps_what_its_routing_can_do_wrong() -> None:
    original = AutoConfig.for_model("deepseek_v3")
    small = twin.shrink(original)
    assert original.hidden_size == 7168, "the original is left as it was"
    assert small.n_group * 2 < small.n_routed_experts
    assert small.topk_group < small.num_experts_per_tok
    assert small.topk_group < small.n_group
    assert (small.norm_topk_prob, small.routed_scaling_factor) == (True, 2.5)
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (1, 3)
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim
    assert small.max_position_embeddings >= 512


def test_shrinking_keeps_flags_that_choose_another_computation() -> None:
    lite = AutoConfig.for_model("deepseek_v2", q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=6)
    small = twin.shrink(lite)
    assert small.q_lora_rank is None
    assert (small.n_group, small.topk_group, small.topk_method) == (1, 1, "greedy")
    assert twin.shrink(AutoConfig.for_model("qwen3_moe")).norm_topk_prob is False
    grouped_query = twin.shrink(AutoConfig.for_model("qwen3_moe"))
    assert grouped_query.num_key_value_heads < grouped_query.num_attention_heads


def test_a_per_layer_list_keeps_every_kind_of_layer() -> None:
    small = twin.shrink(AutoConfig.for_model("gpt_oss"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert len(small.layer_types) == small.num_hidden_layers


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral", "glm4_moe"])
def test_a_shrunk_model_runs_more_than_a_hundred_tokens(family: str) -> None:
    config = twin.shrink(AutoConfig.for_model(family, num_experts_per_tok=6))
    model = twin.build(config, seed=3)
    logits = model(torch.arange(120)[None] % config.vocab_size).logits
    assert logits.isfinite().all()
    assert model.num_parameters() < 1_000_000


def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator() -> None:
    config = twin.shrink(AutoConfig.for_model("deepseek_v3"))
    before = torch.get_rng_state()
    first, second, other = (twin.build(config, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_parameter_like_buffers_are_random_too() -> None:
    model = twin.build(twin.shrink(AutoConfig.for_model("deepseek_v3")), seed=0)
    bias = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.std() > 0.01


@pytest.mark.parametrize("family", twin.names())
def test_a_written_twin_is_a_checkpoint_as_hugging_face_writes_it(family: str, tmp_path: Path) -> None:
    folder = twin.write(family, tmp_path)
    assert twin.write(family, tmp_path) == folder, "the second call finds it"
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name], "nothing is left beside it"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in weight_map
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    text = "Löwe, 5 + 7 = 12"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|begin|><|user|>hi<|end|><|assistant|>"


def test_an_unknown_twin_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refused:
        twin.write("quimera_900", tmp_path)
    assert "deepseek_v2" in refused.value.diagnostics[0].hint
    with pytest.raises(InputRefused, match="no small model") as refused:
        twin.write("mixtrl", tmp_path)
    assert "`mixtral`" in refused.value.diagnostics[0].hint
