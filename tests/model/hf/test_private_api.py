"""The private names of transformers and peft that `ktc/model/hf/private_api.py` holds are there, as ktc takes them."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ktc.model.hf.private_api import ATTENTION, EXPERTS, defers_stop, gate_code, initialise_buffers, register_layers


def test_the_ties_of_an_instance_count_before_those_of_its_class() -> None:
    """`ktc/model/loading/first_layers.py` leaves out those of layers that it removes."""

    class Tied(PreTrainedModel):
        _tied_weights_keys = {"b.weight": "a.weight"}  # noqa: RUF012 - as models of transformers declare it

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)
            self.post_init()

    model = Tied(PretrainedConfig(tie_word_embeddings=True))
    assert model.get_expanded_tied_weights_keys(all_submodels=True) == {"b.weight": "a.weight"}
    model._tied_weights_keys = {}
    assert model.get_expanded_tied_weights_keys(all_submodels=True) == {}


@pytest.fixture(scope="module")
def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(config: Qwen3MoeConfig) -> PreTrainedModel:
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


def test_a_model_is_made_from_a_config_in_a_dtype(model: PreTrainedModel) -> None:
    assert model.dtype == torch.bfloat16


def test_a_config_keeps_its_implementations_where_capture_sets_them(config: Qwen3MoeConfig) -> None:
    for internal in (ATTENTION, EXPERTS):
        public, before = internal.removesuffix("_internal"), getattr(config, internal)
        setattr(config, internal, "of ktc")
        assert getattr(config, public) == "of ktc", "no public setter has checked it"
        setattr(config, internal, before)


def test_a_class_says_what_stays_in_fp32_and_what_a_checkpoint_may_have_besides() -> None:
    for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_unexpected"):
        assert getattr(PreTrainedModel, name) is None
    assert isinstance(PreTrainedModel._supports_sdpa, bool)
    from transformers import DeepseekV3ForCausalLM

    assert "e_score_correction_bias" in " ".join(DeepseekV3ForCausalLM._keep_in_fp32_modules_strict)


@pytest.mark.parametrize("name", ["_can_set_attn_implementation", "_can_set_experts_implementation"])
def test_a_class_reads_its_source_for_what_it_can_do(name: str) -> None:
    """A compiled class has the module of its stock class, whose source is read."""
    assert getattr(Qwen3MoeForCausalLM, name)() is True


def test_generation_reads_a_prompt_in_a_method_of_its_own(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    stock = type(model)._prefill
    monkeypatch.setattr(type(model), "_prefill", lambda *given, **named: (read.append(1), stock(*given, **named))[1])
    model.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=3, prefill_chunk_size=2, pad_token_id=0)
    assert len(read) == 1


def test_generation_chooses_tokens_in_a_method_with_named_criteria(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CompiledModel` adds what waits for a step to them."""
    named: list[dict[str, object]] = []
    stock = type(model)._sample
    monkeypatch.setattr(type(model), "_sample", lambda *given, **more: (named.append(more), stock(*given, **more))[1])
    model.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=3, do_sample=True, pad_token_id=0)
    (found,) = named
    assert {"stopping_criteria", "logits_processor", "generation_config"} <= set(found)


def test_generation_leaves_its_cache_in_the_arguments_of_the_model(model: PreTrainedModel) -> None:
    """`CompiledModel` gives the `DynamicCache` there room to grow."""
    given: dict[str, object] = {}
    config = copy.deepcopy(model.generation_config)
    config.cache_implementation, config.use_cache = None, True
    named = inspect.signature(model._prepare_cache_for_generation).parameters
    values = {"generation_config": config, "model_kwargs": given, "batch_size": 1, "max_cache_length": 8}
    model._prepare_cache_for_generation(**{name: values.get(name) for name in named})
    assert isinstance(given["past_key_values"], DynamicCache)


def test_generation_asks_the_model_whether_it_compiles_it() -> None:
    """`CompiledModel` says that it does not."""
    assert "model_kwargs" in inspect.signature(Qwen3MoeForCausalLM._valid_auto_compile_criteria).parameters


def test_initialising_leaves_marked_parameters_alone(model: PreTrainedModel) -> None:
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    assert initialise_buffers(model, layer)
    assert torch.equal(layer.weight, before)
    del layer.weight._is_hf_initialized
    model._init_weights(layer)
    assert not torch.equal(layer.weight, before)


def test_experts_tell_their_activation_alone(config: Qwen3MoeConfig) -> None:
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config)
    both = torch.randn(3, 16)
    gate, up = both.chunk(2, dim=-1)
    assert torch.allclose(gate_code(experts)(both), nn.functional.silu(gate) * up)


def test_peft_takes_a_layer_of_ours_for_a_class() -> None:
    class Ours(LoraLinear):
        pass

    config = LoraConfig(target_modules=["0"])
    register_layers(config, {nn.Linear: Ours})
    found = get_peft_model(nn.Sequential(nn.Linear(4, 4)), config)
    assert type(found.base_model.model[0]) is Ours


def test_a_loop_on_a_gpu_of_nvidia_or_a_cpu_ends_as_its_criteria_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import utils

    assert not defers_stop(torch.device("cpu")) and not defers_stop(torch.device("cuda"))
    if hasattr(utils, "DeferredStopCheck"):  # since 5.23
        assert defers_stop(torch.device("mps"))
