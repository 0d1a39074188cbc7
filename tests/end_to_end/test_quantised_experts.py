"""Experts in codes, from checkpoint to kernel: what is stored stays as it is; what does not is told by the plan."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_layers import experts_of
from quantised_twins import FP8_CONFIG, by_element, config_of, fp8, twin_of
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ktc.compiler import inspect
from ktc.diagnostics import InputRefused
from ktc.foundation import host
from ktc.foundation.formats import WeightFormat
from ktc.model.checkpoint import gguf_values, open_index
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.quantised_reference import dequantise
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.packed_store import stored_experts, weight_store
from ktc.stages.capture.weights import map_weights
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render
from ktc.stages.plan import Plan

EXPERTS = "model.layers.1.mlp.experts"


def in_int4(
    folder: Path, inter: int = 64, group: int = 32, hidden: int = 64, zero_points: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:  # fmt: skip
    """A checkpoint with its experts in any codes and scales, not those a quantiser would choose, and its weights."""
    model, tensors = twin_of("deepseek_v3", folder, hidden_size=hidden, moe_intermediate_size=inter)
    generator = torch.Generator().manual_seed(6)
    stored: dict[str, Tensor] = dict(tensors)
    worth: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            continue
        rows, columns = tensor.shape
        codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
        scales = torch.rand(rows, columns // group, generator=generator).add(0.1).to(scale_dtype)
        zeros = torch.randint(-8, 8, scales.shape, generator=generator, dtype=torch.int8) * zero_points
        del stored[name]
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.weight_packed": words_of(codes), f"{stem}.weight_scale": scales}
        if zero_points:
            stored[f"{stem}.weight_zero_point"] = words_of(zeros.t()).t().contiguous()
        worth[name] = dequantise(codes - zeros.repeat_interleave(group, 1), scales.float(), group)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    config["quantization_config"] = config_of(group, not zero_points, ignore=ignore)
    (folder / "config.json").write_text(json.dumps(config))
    model.config.quantization_config = config["quantization_config"]
    return model, worth


def words_of(codes: Tensor) -> Tensor:
    """Eight codes of a row in each word, the first in the lowest bits, plus 8; the last word may have less."""
    rows, columns = codes.shape
    nibbles = torch.zeros(rows, -(-columns // 8) * 8, dtype=torch.int32)
    nibbles[:, :columns] = codes + 8
    places = torch.tensor([1 << 4 * place for place in range(8)])
    return nibbles.unflatten(1, (-1, 8)).mul(places).sum(-1).to(torch.int32)


def in_awq(folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The same with zero points and fp16 scales for 128 columns, as AWQ has them."""
    return in_int4(folder, 256, 128, 256, zero_points=True, scale_dtype=torch.float16)


def in_gptq(folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The same with fp16 scales for 64 columns, a row of this twin, and no zero points."""
    return in_int4(folder, group=64, scale_dtype=torch.float16)


def in_int4_rows(folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The same with one scale per row of 64 columns, as compressed-tensors' `channel`."""
    model, worth = in_int4(folder, group=64)
    ignored = model.config.quantization_config["ignore"]
    model.config.quantization_config = config_of(-1, ignore=ignored)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = model.config.quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    return model, worth


def in_fp8(folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A checkpoint with its experts in FP8 blocks of 128 x 128, of which every matrix has less than one in some way."""
    model, tensors = twin_of("deepseek_v3", folder, moe_intermediate_size=160)
    stored: dict[str, Tensor] = dict(tensors)
    worth: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            codes, scales = fp8(*tensor.shape, (128, 128), seed=len(name))
            stored |= {name: codes, f"{name}_scale_inv": scales}
            worth[name] = by_element(codes, scales, (128, 128)).bfloat16()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**FP8_CONFIG, "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    model.config.quantization_config = config["quantization_config"]
    return model, worth


def on_named_thread(check: Callable[..., bool], names: set[str]) -> Callable[..., bool]:
    def named(*given: Any) -> bool:
        names.add(threading.current_thread().name)
        return check(*given)

    return named


def plan_of(folder: Path, setting: str = "") -> Plan:
    (folder / "p.ktr").write_text(f'import "std/moe.ktr"\nrule e {{ match moe.block => cpu_moe({setting}) }}\n')
    return inspect(folder, folder / "p.ktr").plan


@pytest.mark.parametrize(
    ("make", "codes", "stored"),
    [
        (in_int4, ("int4", 32), "int4 in groups of 32"),
        pytest.param(in_int4_rows, ("int4", 64), "int4 with a scale per row", marks=pytest.mark.slow),
        pytest.param(in_awq, ("uint4_g128", 0), "int4 in groups of 128 and zero points", marks=pytest.mark.slow),
        pytest.param(in_gptq, ("uint4_g64", 0), "int4 with a scale per row", marks=pytest.mark.slow),
        (in_fp8, ("fp8", 128), "fp8 128x128"),
    ],
)
def test_codes_of_a_checkpoint_are_multiplied_as_they_are_stored(
    tmp_path: Path,
    make: Callable[[Path], tuple[PreTrainedModel, dict[str, Tensor]]],
    codes: tuple[WeightFormat, int],
    stored: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, worth = make(tmp_path)
    plan = plan_of(tmp_path)
    (found,) = plan.kernels
    assert (found.format_gate_up, found.format_down, found.group_size) == (codes[0], *codes)
    told = {reason.path: reason.text for reason in plan.reasons}
    assert told["model.layers.[1..2].mlp.experts"] == f"stored as {stored}, multiplied as stored"

    sizes = (None, None, None, None)
    spec = FusedMoeSpec("fused_moe", *sizes, "bf16", codes[0], codes[0], "scalar", group_size=codes[1])
    kernel = build(render((spec,), {spec: "test"}), host.detect()).kernel(spec.entry)
    index = open_index(tmp_path)
    sources = map_weights(model, index).sources
    for layer in (1, 2):
        sizes_of_layer = (found.num_experts, found.hidden, found.intermediate, found.top_k)
        experts = experts_of(*(size or 0 for size in sizes_of_layer), kernel=kernel)
        model.get_submodule(f"model.layers.{layer}.mlp").experts = experts
    checking = set[str]()
    for room, check in ((stored_experts, "is_finite"), (gguf_values, "are_finite")):
        monkeypatch.setattr(room, check, on_named_thread(getattr(room, check), checking))
    weight_store.fill(model, [s for s in sources if ".experts." in s.target], index, {})
    assert checking and all(name.startswith("ktc-packing") for name in checking), "the reading thread reads alone"
    module = model.get_submodule(EXPERTS)
    assert isinstance(module, FusedMoe)
    assert module.missing() == ()
    for name, weights in worth.items():
        if name.startswith(EXPERTS):
            expert, part = name.removeprefix(f"{EXPERTS}.").removesuffix("_proj.weight").split(".")
            assert torch.equal(module.expert(int(expert), part), weights)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_config_alone_gives_the_same_kernel(tmp_path: Path) -> None:
    for make, method in ((in_int4, "int4"), (in_awq, "uint4_g128"), (in_fp8, "fp8")):
        folder = tmp_path / method
        make(folder)
        with_weights = plan_of(folder).kernels
        (folder / "model.safetensors").unlink()
        plan = plan_of(folder)
        assert plan.kernels == with_weights
        assert f"stored as {method} by config.json, multiplied as stored" in [reason.text for reason in plan.reasons]


def test_codes_that_no_kernel_multiplies_are_dequantised_and_told(tmp_path: Path) -> None:
    in_int4(tmp_path, group=16)
    plan = plan_of(tmp_path)
    assert plan.kernels[0].format_down == "bf16"
    assert any("stored as int4 in groups of 16, dequantised to bf16" in reason.text for reason in plan.reasons)


def test_a_program_may_quantise_and_is_told(tmp_path: Path) -> None:
    twin_of("deepseek_v3", tmp_path, moe_intermediate_size=64)
    plan = plan_of(tmp_path, "format = int4")
    assert (plan.kernels[0].format_down, plan.kernels[0].group_size) == ("int4", 32)
    rounded = "stored as bf16, quantised to int4 in groups of 32 at load, which rounds each weight"
    assert rounded in [reason.text for reason in plan.reasons]


def test_rows_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    twin_of("deepseek_v3", tmp_path, moe_intermediate_size=48)
    with pytest.raises(InputRefused, match="`int4` cuts rows into groups of 32, and intermediate is 48") as refused:
        plan_of(tmp_path, "format = int4")
    assert refused.value.diagnostics[0].code == "M068"
