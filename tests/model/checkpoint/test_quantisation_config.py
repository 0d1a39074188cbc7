"""`quantization_config` comes from strangers: every malformed value is told by its field, and no pattern takes long."""

from __future__ import annotations

import re
from typing import Any

import pytest
from work import calls

from ktc.model.checkpoint import TensorEntry, stored_weights
from ktc.model.checkpoint.module_names import UnreadablePattern, read_names
from ktc.model.checkpoint.quantisation_config import read_config

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def config_of(weights: object = INT4, **changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **changes}


def fp8_of(size: object) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": size}


def tensors(**shapes: tuple[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    named = {name.replace("__", "."): found for name, found in shapes.items()}
    return {name: TensorEntry(name, "model.safetensors", dtype, shape, 0, 0) for name, (dtype, shape) in named.items()}


def told(stored: dict[str, TensorEntry], config: dict[str, Any] | None) -> list[str]:
    problems = stored_weights(stored, config)[1]
    assert all(problem.code == "I117" and problem.hint for problem in problems)
    return [problem.message for problem in problems]


GROUP = "`quantization_config.config_groups.group_0"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of(config_groups=[1]), "expected an object at `.config_groups`, found list"),
        (config_of(config_groups={"group_0": 1}), f"{GROUP}` in config.json is not an object but int"),
        (
            config_of(config_groups={"group_0": {"targets": [5]}}),
            f"{GROUP}` in config.json: expected str at `.targets[0]`",
        ),
        (
            config_of(config_groups={"group_0": {"targets": 5}}),
            f"{GROUP}` in config.json: expected a list at `.targets`",
        ),
        (config_of([1]), f"{GROUP}` in config.json: expected an object at `.weights`"),
        (config_of(ignore=[5]), "expected str at `.ignore[0]`, found int"),
        (config_of(ignore=5), "expected a list at `.ignore`, found int"),
        (config_of(ignore="lm_head"), "expected a list at `.ignore`, found `lm_head`"),
        (
            config_of({**INT4, "group_size": "32"}),
            f"{GROUP}.weights` in config.json: expected int or NoneType at `.group_s",
        ),
        (config_of({**INT4, "group_size": True}), "expected int or NoneType at `.group_size`, found bool"),
        (
            config_of({**INT4, "group_size": 0}),
            f"{GROUP}.weights.group_size` in config.json holds 0, expected 1 or more",
        ),
        (config_of({**INT4, "group_size": None}), "group_size` in config.json is missing, and `strategy` is `group`"),
        (config_of({**INT4, "strategy": "channel"}), "group_size` in config.json is 32, but `strategy` is `channel`"),
        (config_of({**INT4, "strategy": "rows"}), "at `.strategy`, found `rows`"),
        (config_of({**INT4, "num_bits": True}), "expected int at `.num_bits`, found bool"),
        (config_of({**INT4, "symmetric": 1}), "expected bool at `.symmetric`, found int"),
        (config_of({**INT4, "actorder": [1]}), "at `.actorder`, found list"),
        (config_of({**FP8, "block_structure": [8, 8]}), "block_structure` in config.json does not fit `strategy`"),
        (config_of({**FP8, "strategy": "block"}), "block_structure` in config.json does not fit `strategy`"),
        (fp8_of([True, True]), "expected int at `.weight_block_size[0]`, found bool"),
        (fp8_of([128]), "expected 2 items at `.weight_block_size`, found 1"),
        (fp8_of(128), "expected a list at `.weight_block_size`, found int"),
        (fp8_of([128, 0]), "`quantization_config.weight_block_size` in config.json holds 0, expected 1 or more"),
        ({"quant_method": ["fp8"]}, "quantised by `list`"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantised by ModelOpt's `FP8`; ktc reads NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": [1]}, "quantised by ModelOpt's list"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4_AWQ"}}, "ModelOpt's `NVFP4_AWQ`; ktc"),
        (config_of(ignore=["re:a"] * 1001), "more than 1000 groups or patterns"),
    ],
)
def test_a_malformed_value_is_refused_by_its_field(config: dict[str, Any], expected: str) -> None:
    (message,) = told({}, config)
    assert expected in message


def test_all_malformed_values_are_told_together() -> None:
    config = config_of(
        {**INT4, "group_size": "32", "symmetric": "yes"}, ignore=["re:a+", "re:b{9}"], weight_block_size=8
    )
    assert len(told({}, config)) == 5


@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (0, 2, 16)])
def test_mxfp4_codes_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    (message,) = told(tensors(x_blocks=("u8", shape), x_scales=("u8", shape[:-1])), {"quant_method": "mxfp4"})
    assert message.startswith(f"tensor `x_blocks` is MXFP4 of shape {list(shape)}, expected")


@pytest.mark.parametrize(
    ("config", "scales", "expected"),
    [
        (fp8_of([128, 128]), (2, 2), None),
        (fp8_of([128, 128]), (256, 1), "has scales of shape [256, 1], expected [2, 2] (one per 128x128 weights)"),
        (fp8_of([128, 128]), (), "has scales of shape [], expected [2, 2]"),
        (fp8_of(None), (256, 1), None),
        (config_of(FP8), (256, 1), None),
        (config_of(FP8), (1,), "has scales of shape [1], expected [256, 1]"),
        (config_of({**FP8, "strategy": "tensor"}), (1,), None),
        (config_of({**FP8, "strategy": "block", "block_structure": [128, 128]}), (2, 2), None),
        (config_of({**FP8, "strategy": "group", "group_size": 64}), (256, 4), None),
        (config_of(), (256, 1), "is fp8, but `quantization_config` has int of 4 bits"),
    ],
)
def test_fp8_scales_are_those_of_the_block_that_the_config_names(
    config: dict[str, Any], scales: tuple[int, ...], expected: str | None
) -> None:
    found = told(tensors(a__weight=("fp8", (256, 256)), a__weight_scale=("bf16", scales)), config)
    assert found == [] if expected is None else expected in found[0]


@pytest.mark.parametrize("groups", [0, 2, 3])
def test_codes_with_a_scale_per_row_have_one(groups: int) -> None:
    stored = tensors(a__weight_packed=("i32", (8, 8)), a__weight_scale=("bf16", (8, groups)))
    (message,) = told(stored, config_of({**INT4, "strategy": "channel", "group_size": None}))
    assert f"has scales of shape [8, {groups}], expected [8, 1]" in message


def test_a_group_that_names_a_module_goes_before_one_of_a_class() -> None:
    groups = {
        "head": {"targets": ["lm_head"], "weights": None},
        "rest": {"targets": ["Linear"], "weights": FP8},
        "experts": {"targets": ["re:.*experts.*"], "weights": INT4},
    }
    config, problems = read_config(config_of(config_groups=groups))
    assert problems == ()
    bits = [group and group.weights and group.weights.num_bits for group in map(config.group_of, ("a", "a.experts.0"))]
    assert bits == [8, 4]
    assert config.group_of("lm_head") == config.groups[0]


MODULES = (
    "lm_head", "model.embed_tokens", "model.norm", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj",
    "model.layers.12.mlp.experts.3.down_proj", "model.layers.12.mlp.shared_experts.up_proj", "mtp.fc",
    "model.layers.12.self_attn.q_proj", "model.layers.57.mlp.down_proj", "visual.blocks.0.attn", "vision_tower.x", "",
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        # of Kimi-K2-Thinking
        ".*self_attn.*", ".*shared_experts.*", r".*mlp\.(gate|up|gate_up|down)_proj.*",
        # as they are usual with compressed-tensors
        ".*lm_head", ".*mlp.gate$", "visual.*", "^mtp.*", ".*norm$", r".*layers\.(56|57)\.mlp\.(?:gate|up|down)_proj$",
        r"model\.layers\.\d+\.mlp\.gate$", r".*layers\.\d+.*proj", r".*\d+\d+\..*", ".*", "", ".", "....", ".*a.*e.*d$",
        ".*(experts|self).*(q|down)_proj$", "m.*$", "a^", "$a", ".*.$", r".*(ex|experts)\.3",
    ],
)  # fmt: skip
def test_a_pattern_means_what_it_means_to_compressed_tensors(pattern: str) -> None:
    names = read_names([f"re:{pattern}"])
    expected = [module for module in MODULES if re.match(pattern, module)]
    assert [module for module in MODULES if names.entry_for(module) == f"re:{pattern}"] == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a?){30}b", "(a|aa)*b", "(a*)*b", "(a|b)+", "(a|b)?", "(ab){2}", "(.*|a)", "(a|)", "((a|b)|c)", "(", ")",
        "a|b", "a*", "a+", "a?", "a{9}", ".+", ".?", ".*?", ".**", ".*+", r"\d", r"\d*", r"\d+?", r"\d++", r"\w+",
        r"\1", "\\", "[ab]", "(?=a)", "(?!a)", "(?i)a", "(?P<x>a)", "^*", "$+", r"\.*", "a" * 201,
    ],
)  # fmt: skip
def test_any_other_pattern_is_refused_with_words(pattern: str) -> None:
    with pytest.raises(UnreadablePattern, match=r"cannot be read from|has 201 characters"):
        read_names([f"re:{pattern}"])


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (".*a" * 60 + "b", "a" * 2000),
        (".*(a|aa|aaa)" * 16 + "b", "a" * 2000),
        (r"\d+" * 60 + "b", "1" * 2000),
        (r".*\d+" * 39 + "b", "1" * 2000),
    ],
)
def test_no_pattern_takes_long(pattern: str, name: str) -> None:
    names = read_names([f"re:{pattern}"])
    assert names.entry_for(name) is None
    calls(lambda: names.entry_for(name), most=1_000_000)
