"""Quantised checkpoints: FP8, packed INT4, MXFP4 and NVFP4 become the weights that their own libraries make."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import generate_gparam
from kernel_layers import experts_of
from quantised_twins import FP8_CONFIG, Tensors, by_element, config_of, fp8, random, twin_of
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ktc.compiler import inspect
from ktc.diagnostics import InputRefused
from ktc.model.checkpoint import (
    CheckpointIndex,
    Quantised,
    Step,
    Stored,
    WeightSource,
    gguf_values,
    open_index,
    read_sources,
    values,
    write_sources,
)
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.checkpoint.values import read_blocks
from ktc.model.experts.references.block_reference import dequantise_blocks
from ktc.model.packed_store import weight_store
from ktc.stages.capture.weights import map_weights


def read(tensors: Tensors, source: WeightSource, folder: Path, expert: int | None = None, dtype: Any = None) -> Tensor:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with TensorReader(folder) as reader:
        return values.read_weight(reader, open_index(folder), source, expert, dtype or torch.bfloat16)


def source_of(
    index: CheckpointIndex,
    codes: str,
    scale: str,
    method: Any,
    shape: tuple[int, ...],
    block: tuple[int, int],
    **more: Any,
) -> WeightSource:
    entry, scales = index.tensors[codes], index.tensors[scale]
    quantised = Quantised(method, shape, block, Stored(scale, scales.dtype, scales.shape))
    return WeightSource("t", None, None, codes, entry.file, entry.dtype, entry.shape, quantised=quantised, **more)


# FP8


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [
        (256, 128, (128, 128)),
        (200, 300, (128, 128)),
        (5, 7, (2, 3)),
        (6, 40, (1, 40)),
        (6, 40, (6, 40)),
        (1, 1, (128, 128)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_is_its_code_times_the_scale_of_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    codes, scales = fp8(rows, columns, block)
    tensors = {"w": codes, "w_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    source = source_of(open_index(tmp_path), "w", "w_scale_inv", "fp8", (rows, columns), block)
    for band in (1, 1000, 1 << 22):
        monkeypatch.setattr(values, "_BAND", band)
        assert torch.equal(read(tensors, source, tmp_path, dtype=dtype), by_element(codes, scales, block).to(dtype))


def test_one_expert_of_a_stack_is_read_alone(tmp_path: Path) -> None:
    codes, scales = fp8(10, 12, (4, 8), stack=(3,))
    tensors = {"w": codes, "w_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    index = open_index(tmp_path)
    source = source_of(
        index,
        "w",
        "w_scale_inv",
        "fp8",
        (3, 10, 12),
        (4, 8),
        transform="per_expert",
        steps=(Step("transpose", (1, 2)),),
    )
    for expert in range(3):
        expected = by_element(codes, scales, (4, 8))[expert].t()
        assert torch.equal(read(tensors, source, tmp_path, expert, torch.float32), expected)


@pytest.mark.parametrize(
    "scales",
    [
        torch.tensor([[126, 130]], dtype=torch.uint8),
        torch.tensor([[126, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    ],
)
def test_scales_may_be_exponents_of_two(tmp_path: Path, scales: Tensor) -> None:
    codes, _ = fp8(4, 8, (4, 4))
    tensors = {"w": codes, "w_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    source = source_of(open_index(tmp_path), "w", "w_scale_inv", "fp8", (4, 8), (4, 4))
    expected = codes.float() * torch.tensor([0.5] * 4 + [8.0] * 4)
    assert torch.equal(read(tensors, source, tmp_path, dtype=torch.float32), expected)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_has_the_value_that_pytorch_gives_it(kind: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(kind)
    assert torch.equal(values._fp8_values(codes).nan_to_num(7e9), codes.float().nan_to_num(7e9))
    finite = codes[codes.float().isfinite()]
    assert torch.equal(values._fp8_values(finite), finite.float())


# Packed INT4


def packed(weight: Tensor, group: int, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensors, Tensor]:
    """What compressed-tensors stores for `weight`, and what it reads back."""
    columns = weight.shape[1]
    strategy = "channel" if group == -1 else "group"
    arguments = QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy=strategy, group_size=None if group == -1 else group
    )
    grouped = weight.unflatten(1, (-1, columns if group == -1 else group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = (grouped.abs().amax(-1) / 7 if symmetric else (high - low) / 15).to(scale_dtype)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    if not symmetric:
        zero = (-8 - low / scale.float()).round().clamp(-8, 7).to(torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state: Any = {"weight": weight.to(scale_dtype), "weight_scale": scale, "weight_zero_point": zero}
    stored = cast("Any", PackedQuantizationCompressor).compress(state, scheme)
    restored = cast("Any", PackedQuantizationCompressor).decompress(dict(stored), scheme)["weight"]
    return dict(stored), restored


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_int4_is_what_compressed_tensors_reads(
    tmp_path: Path, group: int, symmetric: bool, scale_dtype: torch.dtype
) -> None:
    rows, columns = 52, (256 if group != -1 else 45)  # neither fills its last word when it can choose
    stored, expected = packed(random(rows, columns, seed=group + 5), group, symmetric, scale_dtype)
    model, tensors = twin_of("deepseek_v3", tmp_path)
    name = "model.layers.0.self_attn.o_proj"
    target = cast("nn.Linear", model.get_submodule(name))
    target.weight = nn.Parameter(torch.empty(rows, columns, device="meta", dtype=scale_dtype))
    del tensors[f"{name}.weight"]
    tensors |= {f"{name}.{key}": tensor for key, tensor in stored.items()}
    assert torch.equal(filled(model, tensors, config_of(group, symmetric), tmp_path)[f"{name}.weight"], expected)

    index = open_index(tmp_path)
    (row,) = (row for row in map_weights(model, index).sources if row.target == f"{name}.weight")
    rounded_codes = symmetric and scale_dtype == torch.bfloat16
    assert (row.plain_rows is not None) == (group != -1 and scale_dtype != torch.float32 and not rounded_codes)
    if row.plain_rows is not None:  # a kernel multiplies the same weights
        with TensorReader(tmp_path) as reader:
            blocks = read_blocks(reader, index, row, None)()
        assert gguf_values.are_finite(blocks, row.plain_rows)
        assert torch.equal(dequantise_blocks(blocks, row.plain_rows).to(scale_dtype), expected)


# MXFP4


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8, generator=generator)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    index = open_index(tmp_path)
    steps = (Step("transpose", (1, 2)),)
    source = source_of(
        index, "w_blocks", "w_scales", "mxfp4", (3, 10, 64), (1, 32), transform="per_expert", steps=steps
    )
    expected = convert_moe_packed_tensors(blocks, scales)
    for expert in range(3):
        assert torch.equal(read(tensors, source, tmp_path, expert), expected[expert])


# NVFP4


def in_nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """The tensors that compressed-tensors makes of a weight, and the fp32 weights that it reads in them."""
    arguments = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    overall = cast("Any", generate_gparam)(weight.amin().reshape(1), weight.amax().reshape(1))
    scale = (overall * weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6).to(torch.float8_e4m3fn).float()
    state: Any = {"weight": weight, "weight_scale": scale, "weight_global_scale": overall}
    stored = cast("Any", NVFP4PackedCompressor).compress(state, scheme)
    restored = cast("Any", NVFP4PackedCompressor).decompress(dict(stored), scheme)["weight"]
    return dict(stored), restored.float()


NVFP4_CONFIG = {
    **config_of(16, type="float", strategy="tensor_group"), "format": "nvfp4-pack-quantized",
}  # fmt: skip
MODELOPT_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}


def as_modelopt(stored: Tensors) -> Tensors:
    """The same weight as ModelOpt writes it."""
    scales = {"weight_scale": stored["weight_scale"], "weight_scale_2": 1 / stored["weight_global_scale"].reshape(())}
    return {"weight": stored["weight_packed"], **scales}


@pytest.mark.parametrize("config", [NVFP4_CONFIG, MODELOPT_CONFIG], ids=lambda config: config["quant_method"])
def test_nvfp4_is_what_compressed_tensors_reads_and_experts_are_kept_as_they_are(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model, tensors = twin_of("deepseek_v3", tmp_path, moe_intermediate_size=64)
    expected = dict(tensors)
    for name in [name for name in tensors if ".mlp.experts." in name or name.endswith("o_proj.weight")]:
        stored, weight = in_nvfp4(tensors.pop(name).float())
        stored = stored if config is NVFP4_CONFIG else as_modelopt(stored)
        tensors |= {f"{name.removesuffix('weight')}{key}": tensor for key, tensor in stored.items()}
        expected[name] = weight
    plain, _ = twin_of("deepseek_v3", tmp_path, moe_intermediate_size=64)
    right = filled(plain, expected, None, tmp_path)
    found = filled(model, tensors, config, tmp_path)
    for name, tensor in right.items():  # 1 / scale is rounded: a few weights are another number of bf16
        assert torch.allclose(found[name].float(), tensor.float(), rtol=2**-7, atol=0), name
        assert (found[name] != tensor).float().mean() < 0.01, name

    index = open_index(tmp_path)
    rows = [row for row in map_weights(model, index).sources if row.quantised is not None]
    assert {row.kept_as for row in rows if row.expert is not None} == {("nvfp4", 32)}
    assert {row.plain_rows for row in rows if row.expert is None} == {"nvfp4"}
    with TensorReader(tmp_path) as reader:
        blocks = read_blocks(reader, index, rows[0], rows[0].expert)()
        weight = values.read_weight(reader, index, rows[0], rows[0].expert, torch.bfloat16)
    assert gguf_values.are_finite(blocks, "nvfp4")
    assert torch.equal(dequantise_blocks(blocks, "nvfp4").bfloat16(), weight)
    blocks[0, 4] = 0x7F
    assert not gguf_values.are_finite(blocks, "nvfp4")


def test_scales_of_activations_are_told_and_not_used(tmp_path: Path) -> None:
    model, tensors = twin_of("deepseek_v3", tmp_path)
    stored, _ = in_nvfp4(tensors.pop("model.layers.0.self_attn.o_proj.weight").float())
    tensors |= {f"model.layers.0.self_attn.o_proj.{key}": tensor for key, tensor in stored.items()}
    tensors["model.layers.0.self_attn.o_proj.input_global_scale"] = torch.ones(1)
    model.config.quantization_config = NVFP4_CONFIG
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (warning,) = map_weights(model, open_index(tmp_path)).warnings
    assert (warning.code, warning.severity, "1 of NVFP4" in warning.message) == ("I124", "warning", True)


def test_nvfp4_whose_inputs_have_factors_is_refused(tmp_path: Path) -> None:
    model, tensors = twin_of("deepseek_v3", tmp_path)
    stored, _ = in_nvfp4(tensors.pop("model.layers.0.self_attn.o_proj.weight").float())
    tensors |= {f"model.layers.0.self_attn.o_proj.{key}": tensor for key, tensor in as_modelopt(stored).items()}
    tensors["model.layers.0.self_attn.o_proj.pre_quant_scale"] = torch.ones(64)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(InputRefused) as refused:
        map_weights(model, open_index(tmp_path))
    (problem,) = refused.value.diagnostics
    assert (problem.code, "NVFP4_AWQ" in problem.message) == ("I117", True)


# Whole checkpoints

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def filled(model: PreTrainedModel, tensors: Tensors, config: dict[str, Any] | None, folder: Path) -> Tensors:
    """What the rows make of the tensors, through the text of `weights.json`."""
    model.config.quantization_config = config
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    index = open_index(folder)
    mapped = map_weights(model, index)
    assert mapped.warnings == ()
    weight_store.fill(model, read_sources(write_sources(mapped.sources)), index, {})
    return dict(model.state_dict())


def in_fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors with every projection in FP8, and what they are worth."""
    stored, worth = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            codes, scales = fp8(*tensor.shape, (32, 32), seed=len(name))
            stored |= {name: codes, f"{name}_scale_inv": scales}
            worth[name] = by_element(codes, scales, (32, 32)).to(torch.bfloat16)
    return stored, worth


def test_an_fp8_checkpoint_loads_as_the_checkpoint_it_stands_for(tmp_path: Path) -> None:
    model, tensors = twin_of("deepseek_v3", tmp_path)
    plain = copy.deepcopy(model)
    stored, worth = in_fp8(tensors)
    found = filled(model, stored, FP8_CONFIG, tmp_path)
    expected = filled(plain, worth, None, tmp_path)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_quantised_experts_go_into_the_module_that_packs_them(tmp_path: Path) -> None:
    model, tensors = twin_of("deepseek_v3", tmp_path)
    stored, worth = in_fp8(tensors)
    fqn = "model.layers.1.mlp.experts"
    experts, hidden, inner = model.get_submodule(fqn).get_parameter("down_proj").shape
    bank = experts_of(experts, hidden, inner, 2)
    model.set_submodule(fqn, bank)
    model.config.quantization_config = FP8_CONFIG
    stock = twin_of("deepseek_v3", tmp_path)[0]
    stock.config.quantization_config = FP8_CONFIG
    save_file(stored, tmp_path / "model.safetensors")
    index = open_index(tmp_path)
    weight_store.fill(model, map_weights(stock, index).sources, index, {})
    assert bank.missing() == ()
    for expert in range(experts):
        for part in ("gate", "up", "down"):
            assert torch.equal(bank.expert(expert, part), worth[f"{fqn}.{expert}.{part}_proj.weight"])


def test_gpt_oss_experts_are_read_from_mxfp4(tmp_path: Path) -> None:
    model, tensors = twin_of("gpt_oss", tmp_path, intermediate_size=96)
    stored, worth = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors[name].shape
        shape = (experts, rows, columns // 32, 16)
        generator = torch.Generator().manual_seed(len(name))
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 128, shape[:-1], dtype=torch.uint8, generator=generator)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        worth[name] = convert_moe_packed_tensors(blocks, scales)
    plain = copy.deepcopy(model)
    found = filled(
        model, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, tmp_path
    )
    expected = filled(plain, worth, None, tmp_path)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# What is refused

Change = Callable[[Tensors, dict[str, Any]], object]


def without(name: str) -> Change:
    return lambda tensors, _: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors, _: tensors.update({name: tensor})


def setting(**changes: Any) -> Change:
    return lambda _, config: config.update(changes)


def weights(**changes: Any) -> Change:
    return lambda _, config: config["config_groups"]["group_0"]["weights"].update(changes)


def refusal(stored: Tensors, config: dict[str, Any], change: Change, family: str, folder: Path) -> str:
    model, tensors = twin_of(family, folder)
    tensors, config = {**tensors, **stored}, copy.deepcopy(config)
    change(tensors, config)
    with pytest.raises(InputRefused) as refused:
        filled(model, tensors, config, folder)
    (problem,) = refused.value.diagnostics
    assert problem.hint
    return f"{problem.code} {problem.message}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            without(f"{EXPERT}_scale_inv"),
            f"I117 tensor `{EXPERT}` has no scales: the checkpoint lacks `{EXPERT}_scale_inv`",
        ),
        (
            put(f"{EXPERT}_scale_inv", torch.ones(2, 1)),
            f"I117 tensor `{EXPERT}` has scales of shape [2, 1], expected [2, 2] (one per 32x32 weights)",
        ),
        (setting(weight_block_size=[64, 64]), "expected [1, 1] (one per 64x64 weights)"),
        (put(f"{EXPERT}_scale_inv", torch.ones(2, 2, dtype=torch.int64)), "has scales stored as i64"),
        (setting(quant_method="gptq"), "I117 the checkpoint is quantised by `gptq`; ktc reads compressed-tensors, fp8"),
        (setting(quant_method=None), "I117 the checkpoint is quantised by `None`"),
        (put("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn)), "only matrices have scales"),
        (
            put(EXPERT, torch.full((64, 48), torch.nan).to(torch.float8_e4m3fn)),
            f"L407 tensor `{EXPERT}` in `model.safetensors` holds values that are not finite",
        ),
    ],
)
def test_fp8_that_does_not_add_up_is_refused(tmp_path: Path, change: Change, expected: str) -> None:
    codes, scales = fp8(64, 48, (32, 32))
    stored = {EXPERT: codes, f"{EXPERT}_scale_inv": scales}
    assert expected in refusal(stored, FP8_CONFIG, change, "deepseek_v3", tmp_path)


STEM = EXPERT.removesuffix(".weight")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            without(f"{EXPERT}_scale"),
            f"I117 tensor `{EXPERT}_packed` has no scales: the checkpoint lacks `{EXPERT}_scale`",
        ),
        (
            put(f"{EXPERT}_scale", torch.ones(64, 2)),
            "has scales of shape [64, 2], expected [64, 3] (one per 1x16 weights)",
        ),
        (weights(group_size=32), "expected [64, 2] (one per 1x32 weights)"),
        (weights(num_bits=8), "is packed int of 8 bits; ktc reads int of 4"),
        (weights(type="float"), "is packed float of 4 bits"),
        (weights(actorder="group"), "columns in another order"),
        (weights(symmetric=False), f"the checkpoint lacks `{EXPERT}_zero_point`"),
        (setting(ignore=["re:.*mlp\\.experts.*"]), "is quantised, but `quantization_config` ignores its module"),
        (setting(ignore=[STEM]), "is quantised, but"),
        (setting(ignore=["re:(a*)*b"]), "pattern `(a*)*b` cannot be read"),
        (setting(config_groups=[1]), "`quantization_config` in config.json: expected an object at `.config_groups`"),
        (setting(config_groups={}), "no group of `quantization_config` in config.json names its module"),
        (put(f"{EXPERT}_packed", torch.zeros(64, 6)), "is packed as f32 [64, 6], expected a matrix of i32"),
    ],
)
def test_packed_int4_that_does_not_add_up_is_refused(tmp_path: Path, change: Change, expected: str) -> None:
    stored, _ = packed(random(64, 48), 16, True, torch.bfloat16)

    def changed(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors[EXPERT]
        change(tensors, config)

    named = {f"{STEM}.{key}": tensor for key, tensor in stored.items()}
    assert expected in refusal(named, config_of(16), changed, "deepseek_v3", tmp_path)


# What the plan says


@pytest.mark.slow
def test_the_plan_tells_what_grows_at_load(tmp_path: Path) -> None:
    model, tensors = twin_of("deepseek_v3", tmp_path)
    stored, _ = in_fp8(tensors)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": FP8_CONFIG}))
    (tmp_path / "p.ktr").write_text('import "std/moe.ktr"\nrule e { match moe.block => cpu_moe() }\n')
    plan = inspect(tmp_path, tmp_path / "p.ktr").plan
    assert {kernel.format_down for kernel in plan.kernels} == {"bf16"}
    experts = model.get_submodule("model.layers.1.mlp.experts")
    size = 2 * 2 * sum(parameter.numel() for parameter in experts.parameters())
    told = {reason.path: reason.text for reason in plan.reasons if "dequantised" in reason.text}
    text = f"stored as fp8 32x32, dequantised to bf16 at load: {size:,} bytes"
    assert told["model.layers.[1..2].mlp.experts"] == text
    (tmp_path / "model.safetensors").unlink()
    by_config = [reason.text for reason in inspect(tmp_path, tmp_path / "p.ktr").plan.reasons]
    assert "stored as fp8 by config.json, dequantised to bf16 at load" in by_config
