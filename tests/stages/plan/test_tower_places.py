"""Towers for images have a device of their own: rules find them in any family, and plans count their bytes there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import CPU, rules

from ktc.foundation.host import Gpu
from ktc.model.hf.stock_model import parameter_bytes
from ktc.model.twin import build, default_config, shrink
from ktc.stages.capture import capture, open_model
from ktc.stages.match import match
from ktc.stages.plan import make_plan

HOST = replace(CPU, gpus=(Gpu("a", 8 << 30),))
RULES = """
rule experts { match moe.opaque as m => cpu_moe on m.experts }
rule all     { match module at "*" => place(cpu) }
rule eyes overrides all { match module as m at "*", "model.*" where m.tower => place(cuda:0) }
"""
TOWERS = {
    "qwen3_vl_moe": {"model.visual"},
    "gemma4": {"model.vision_tower", "model.embed_vision"},
    "aria": {"model.vision_tower", "model.multi_modal_projector"},
    "llama4": {"vision_model", "multi_modal_projector"},
}


@pytest.mark.parametrize("family", TOWERS)
def test_towers_are_placed_by_what_they_are(family: str, tmp_path: Path) -> None:
    model = build(shrink(default_config(family, whole=True)), seed=0)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    captured = capture(open_model(tmp_path))
    found = rules(RULES, tmp_path)
    plan = make_plan(captured, (), match(captured, found, HOST), found, HOST)
    towers = {placement.fqn for placement in plan.placements if placement.device == "cuda:0"}
    assert towers == set(captured.towers) == TOWERS[family]
    kinds = {device.device: device.kinds for device in plan.memory.devices}
    wanted = sum(parameter_bytes(model.get_submodule(fqn)) for fqn in towers)
    assert set(kinds["cuda:0"]) == {"towers"} and "towers" not in kinds["cpu"]
    assert wanted <= kinds["cuda:0"]["towers"] < wanted + (1 << 20), "and buffers"


def test_a_model_of_text_has_no_tower(tmp_path: Path) -> None:
    build(shrink(default_config("qwen3_moe")), seed=0).save_pretrained(tmp_path)
    assert capture(open_model(tmp_path)).towers == ()
