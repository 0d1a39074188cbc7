"""Every family with routed experts has a twin: it builds, runs, and has every kind of layer that its model has."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.graph.typed import named_modules
from ktc.model.twin.sizes import EXPERT_COUNTS, TOP_KS
from ktc.stages.capture import ModelSource, capture

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((1, 1), (3, 37), (2, 64))

SHOWN = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "jamba", "minimax_m2", "mixtral", "olmoe",
    "qwen2_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
REST = tuple(name for name in twin.moe_families() if name not in SHOWN)
ALL = [*SHOWN, *(pytest.param(name, marks=pytest.mark.full) for name in REST)]


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))


def kinds_of_layers(model: nn.Module) -> dict[int, frozenset[tuple[str, str]]]:
    """What each decoder layer is made of: the names and classes of its modules, of equal experts only one."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    stack = max(stacks, key=lambda m: sum(p.numel() for p in m.parameters()))
    return {
        index: frozenset(
            (".".join("0" if part.isdigit() else part for part in name.split(".")), type(module).__name__)
            for name, module in named_modules(layer)
        )
        for index, layer in enumerate(stack)
    }


def first_size(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    holders = (config, getattr(config, "ffn_config", None))
    return next(size for holder in holders for name in names if isinstance(size := getattr(holder, name, None), int))


@pytest.mark.parametrize("family", ALL)
def test_a_twin_runs_and_has_every_kind_of_layer_of_its_model(family: str) -> None:
    original = twin.default_config(family)
    config = twin.shrink(original)
    assert type(config) is type(original)
    model = twin.build(config, seed=1)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for batch, length in SHAPES:
            tokens = torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
            assert model(input_ids=tokens, use_cache=False).logits.isfinite().all()
    assert model.num_parameters() < 2_000_000
    full = kinds_of_layers(on_meta(original))
    small = kinds_of_layers(model)
    assert set(small.values()) == set(full.values())
    with_experts = {kind for kind in full.values() if any("moe" in c.lower() or "expert" in c.lower() for _, c in kind)}
    counts = [sum(kind in with_experts for kind in kinds.values()) for kinds in (small, full)]
    assert min(2, counts[1]) <= counts[0]


@pytest.mark.parametrize("family", ALL)
def test_the_routing_of_a_twin_can_go_wrong(family: str) -> None:
    original = twin.default_config(family)
    config = twin.shrink(original)
    experts, top_k = first_size(config, EXPERT_COUNTS), first_size(config, TOP_KS)
    assert top_k >= 2 or first_size(original, TOP_KS) == 1
    assert experts >= 4 * top_k
    groups = getattr(config, "n_group", None) or getattr(config, "num_expert_group", None) or 1
    assert groups * 2 < experts
    assert groups == 1 or config.topk_group < top_k


@pytest.mark.full
@pytest.mark.parametrize("family", twin.moe_families())
def test_a_twin_is_captured(family: str) -> None:
    config = twin.shrink(twin.default_config(family))
    config.dtype = torch.float32
    captured = capture(ModelSource(family, None, config, None))
    assert {site.layer for site in captured.sites} == set(range(len(kinds_of_layers(captured.model))))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_dense_families_shrink_too(family: str) -> None:
    assert family not in twin.moe_families()
    config = twin.shrink(twin.default_config(family))
    model = twin.build(config, seed=1)
    assert model(torch.arange(120)[None], use_cache=False).logits.isfinite().all()
    assert model.num_parameters() < 2_000_000


def test_families_are_found_by_what_grows_with_the_number_of_experts() -> None:
    found = twin.moe_families()
    assert set(SHOWN) <= set(found)
    assert {"gemma4_text", "llama4_text", "qwen3_5_moe_text"} <= set(found)
    assert not {"gemma4", "llama4", "qwen3_5_moe"} & set(found), "a wrapper of a language model is no second family"


def test_defaults_that_leave_the_experts_open_are_filled() -> None:
    assert twin.default_config("gemma4_text").enable_moe_block
    assert twin.default_config("hunyuan_v1_moe").num_experts > twin.default_config("hunyuan_v1_moe").moe_topk > 1
    assert twin.default_config("dots1").n_routed_experts is not None
    assert set(twin.default_config("lfm2_moe").layer_types) == {"conv", "full_attention"}
    assert AutoConfig.for_model("mixtral").to_dict().keys() == twin.default_config("mixtral").to_dict().keys()


def test_a_model_type_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(InputRefused) as refused:
        twin.default_config("mixtrall")
    assert "mixtral" in refused.value.diagnostics[0].hint


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("jamba", {}, {"num_hidden_layers": 5, "attn_layer_offset": 4}),
        ("qwen3_moe", {"decoder_sparse_step": 2}, {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}, {"num_hidden_layers": 3, "mlp_only_layers": [0]}),
        ("gemma4_text", {}, {"layer_types": ["sliding_attention", "full_attention"]}),
        ("mimo_v2_flash", {}, {"head_dim": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
        (
            "laguna",
            {"num_attention_heads_per_layer": [48] * 20 + [96] * 20},
            {"num_attention_heads_per_layer": [4, 4, 8]},
        ),
        ("mixtral", {"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
        ("deepseek_v2", {"q_lora_rank": None, "n_group": None}, {"q_lora_rank": None, "n_group": None}),
        ("mixtral", {"eos_token_id": [7, 9999]}, {"eos_token_id": 2}),
    ],
)
def test_shrinking_keeps_what_settings_mean(
    family: str, settings: dict[str, object], expected: dict[str, object]
) -> None:
    config = AutoConfig.for_model(family)
    for name, value in settings.items():
        setattr(config, name, value)
    small = twin.shrink(config)
    assert {name: getattr(small, name) for name in expected} == expected


def test_a_config_class_that_refuses_its_small_sizes_is_told_about() -> None:
    with pytest.raises(InputRefused, match=r"xlnet.*d_head"):
        twin.shrink(AutoConfig.for_model("xlnet"))


def test_a_second_twin_shares_no_width_with_the_first() -> None:
    first, second = (twin.shrink(AutoConfig.for_model("qwen3_moe"), second=second) for second in (False, True))
    names = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    assert all(getattr(first, name) != getattr(second, name) for name in names)
    model = twin.build(second, 1)
    assert model(input_ids=torch.zeros(1, 5, dtype=torch.long)).logits.isfinite().all()
