"""A GGUF checkpoint through the whole of ktc: planned, compiled with a kernel, loaded, packed and verified."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import gguf_twins
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoTokenizer

import ktc
from ktc.cli.app import main
from ktc.compiler import analyse
from ktc.foundation.host import find_compiler
from ktc.model.experts.layouts.stock_layout import canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.stages.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")


def experts_kernels(plan: Plan) -> list[FusedMoeSpec]:
    """Return the kernels of a plan without those of linear layers."""
    return [kernel for kernel in plan.kernels if isinstance(kernel, FusedMoeSpec)]


def test_the_plan_tells_what_is_kept_and_what_is_dequantised_in_how_many_bytes(tmp_path: Path) -> None:
    types = {"experts": Type.Q5_0, "down": (Type.Q8_0, Type.Q4_0), "rest": Type.Q8_0}
    folder = gguf_twins.write("qwen3_moe", tmp_path / "model", **types).folder
    plan = analyse(folder, "moe-lora").plan
    told = {(reason.path, reason.text) for reason in plan.reasons if reason.text.startswith("stored as")}
    experts, where = 2 * 2 * 16 * 64 * 64 * 2, "model.layers.[0..1].mlp.experts"
    assert (where, f"stored as q5_0, dequantised to bf16 at load: {experts:,} bytes") in told
    for layer, name in enumerate(("q8_0", "q4_0")):
        assert (f"model.layers.{layer}.mlp.experts", f"stored as {name}, multiplied as stored") in told
    table = f"stored as q8_0, dequantised to bf16 at load: {512 * 64 * 2:,} bytes"
    assert ("model.embed_tokens", table) in told
    assert [kernel.formats for kernel in experts_kernels(plan)] == [("bf16", "q8_0"), ("bf16", "q4_0")]


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_the_commands_work_on_a_folder_with_a_gguf_file(tmp_path: Path) -> None:
    written = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=Type.Q5_1, rest=Type.Q8_0, shards=2)
    out = tmp_path / "from_gguf"
    for command in (
        ["check", "moe-lora", str(written.folder)],
        ["compile", str(written.folder), "moe-lora", "-o", str(out), "--isa", "scalar"],
        ["pack", str(out)],
        ["verify", str(out), "--source"],
    ):
        assert main([*command, "--quiet"]) == 0, command
    inputs = AutoTokenizer.from_pretrained(out)("The router scores all of them,", return_tensors="pt")
    expected = written.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    reference = ktc.load(out, reference=True)
    assert torch.equal(reference.generate(**inputs, max_new_tokens=12), expected)
    exact = written.model(**inputs).logits
    half = copy.deepcopy(written.model).bfloat16()(**inputs).logits
    for options in ({}, {"map": True}):
        loaded = ktc.load(out, **options)
        assert any(isinstance(module, FusedMoe) for module in loaded.modules())
        assert (loaded(**inputs).logits - exact).abs().mean() <= 1.5 * (half - exact).abs().mean()
        assert loaded.name_or_path == str(written.folder)


WIDE = {"hidden_size": 256, "intermediate_size": 256}  # a block of a K type
NATIVE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt_oss", {"experts": Type.MXFP4}, {}),
    ("qwen3_moe", {"experts": Type.Q8_0, "down": (Type.Q4_0, Type.Q8_0)}, {}),
    (
        "olmoe",
        {"experts": Type.Q4_K, "down": (Type.Q6_K,)},
        {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256},
    ),
]


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("family", "stored", "sizes"), NATIVE)
def test_what_a_kernel_multiplies_is_what_the_file_holds(
    tmp_path: Path, family: str, stored: dict[str, Any], sizes: dict[str, Any]
) -> None:
    """No weight of the experts is rounded, the plan says so, and what it takes is what the store holds."""
    written = gguf_twins.write(family, tmp_path / "model", **stored, **sizes)
    plans: list[Plan] = []
    out = ktc.compile(
        written.folder, "moe-lora", tmp_path / "native", settings={"format": "stored"},
        observe=lambda stage, value: plans.append(cast("Plan", value)) if stage == "plan" else None,
    )  # fmt: skip
    first, *down = (each.name.lower() for each in (stored["experts"], *stored.get("down", ())))
    formats = {tuple(dict.fromkeys((first, name))) for name in down or [first]}
    assert {kernel.formats for kernel in experts_kernels(plans[0])} == formats
    told = [reason.text for reason in plans[0].reasons]
    assert all(f"stored as {name}, multiplied as stored" in told for name in (first, *down))
    loaded = ktc.load(out)
    banks = {name: module for name, module in loaded.named_modules() if isinstance(module, FusedMoe)}
    for fqn, bank in banks.items():
        for name in ("gate_up_proj", "down_proj"):
            for expert, matrix in enumerate(getattr(written.model.get_submodule(fqn), name)):
                for part, values in canonical_parts(bank.form, name, matrix):
                    assert torch.equal(bank.expert(expert, part), values.bfloat16()), (expert, part)
    ids = torch.arange(4, 40).reshape(2, 18)
    exact, half = (model(input_ids=ids).logits for model in (written.model, copy.deepcopy(written.model).bfloat16()))
    # Medians: where rounding moves a router's choice, a few logits are far off in either.
    assert (loaded(input_ids=ids).logits - exact).abs().median() <= 1.5 * (half - exact).abs().median()
    report = ktc.pack(out)
    assert report.size == sum(bank.packed_bytes for bank in banks.values())
    assert torch.equal(ktc.load(out, map=True)(input_ids=ids).logits, loaded(input_ids=ids).logits)
    assert all(finding.state == "good" for finding in ktc.verify(out, source=True))
