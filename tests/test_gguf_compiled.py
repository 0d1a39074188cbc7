"""A GGUF checkpoint through the whole of ktc: planned, compiled with a kernel, loaded, packed and verified."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf_twins
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoTokenizer

import ktc
from ktc.cli import main
from ktc.compiler import analyse
from ktc.host import find_compiler
from ktc.runtime.fused_moe import FusedMoe

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_plan_tells_what_is_dequantised_and_in_how_many_bytes(tmp_path: Path) -> None:
    folder = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=Type.Q4_1, rest=Type.Q8_0).folder
    _, _, plan, _ = analyse(folder, "moe-lora", {}, None, lambda stage, value: None)
    told = {reason.path: reason.text for reason in plan.reasons if reason.text.startswith("stored as")}
    experts = 3 * 2 * 16 * 64 * 64 * 2
    assert told["model.layers.[0..1].mlp.experts"] == f"stored as q4_1, dequantised to bf16 at load: {experts:,} bytes"
    assert told["model.embed_tokens"] == f"stored as q8_0, dequantised to bf16 at load: {512 * 64 * 2:,} bytes"
    assert [kernel.formats for kernel in plan.kernels] == [("bf16",)]


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
