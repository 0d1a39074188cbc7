"""The memory of a pass through a tower for images: estimated above what a pass takes, within twice, and planned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import CPU, rules
from image_models import image_processor, picture
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma4ImageProcessorPil

from ktc.model.twin import build, default_config, shrink
from ktc.stages.capture import capture, open_model
from ktc.stages.match import match
from ktc.stages.plan import make_plan
from ktc.stages.plan.tower_passes import TowerPass, tower_pass

RULES = """
rule experts { match moe.opaque as m => cpu_moe on m.experts }
rule all     { match module at "*" => place(cpu) }
"""


def wide(family: str) -> Any:
    """A model with a tower that is wide enough for an image's pixels to be the smaller part."""
    config: Any = shrink(default_config(family, whole=True))
    heads = "num_heads" if hasattr(config.vision_config, "num_heads") else "num_attention_heads"
    for name, value in {"hidden_size": 512, "intermediate_size": 2048, heads: 8, "depth": 2}.items():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, value)
    if family == "gemma4":
        config.vision_config.num_key_value_heads, config.vision_config.head_dim = 8, 64
    return build(config, seed=0).to(torch.bfloat16).eval()


def inputs(model: Any, family: str) -> dict[str, torch.Tensor]:
    image = picture(0, 448, 448)
    if family == "gemma4":
        made = dict(Gemma4ImageProcessorPil()(images=[image], return_tensors="pt"))
        return {name: made[name] for name in ("pixel_values", "image_position_ids")}
    config = model.config.vision_config
    processor = image_processor(model.config)
    processor.size = {"shortest_edge": 32 * 32, "longest_edge": 1 << 20}
    assert config.patch_size == processor.patch_size
    return dict(processor(images=[image], return_tensors="pt"))


def peak(model: Any, given: dict[str, torch.Tensor]) -> int:
    """The bytes at the peak of a pass, its pixels in fp32 and in the model's dtype among them."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        pixels = given["pixel_values"].to(model.dtype)
        model.base_model.get_image_features(**{**given, "pixel_values": pixels})
    events: Any = run.profiler
    changes = [event.nbytes() for event in events.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum(changes).max()) + given["pixel_values"].nbytes


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gemma4"])
def test_the_estimate_is_above_the_peak_of_a_pass_and_within_twice(family: str) -> None:
    model = wide(family)
    towers: list[str] = [name for name, _ in model.base_model.named_children() if name != "language_model"]
    facts = {"hidden": model.config.get_text_config().hidden_size}
    source = SimpleNamespace(config=model.config, folder=None)
    captured: Any = SimpleNamespace(source=source, towers=towers, model=model.base_model, facts=facts)
    one, given = tower_pass(captured), inputs(model, family)
    assert one is not None
    pixels = given["pixel_values"]
    patches = pixels.shape[:-1].numel()
    found = peak(model, given)
    assert found <= one.per_patch * patches <= 2 * found


def test_plans_have_a_pass_over_the_largest_image_of_the_processor(tmp_path: Path) -> None:
    model: Any = wide("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    processor = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16 * 16 * 2048}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    captured = capture(open_model(tmp_path))
    found = rules(RULES, tmp_path)
    plan = make_plan(captured, (), match(captured, found, CPU), found, CPU)
    one = tower_pass(captured)
    assert one is not None and (one.fqn, one.patches, one.merged) == ("model.visual", 2048, 4)
    use = next(use for use in plan.memory.workloads if use.name == "infer")
    running = sum(size for purpose, size in use.needs["cpu"].items() if purpose not in ("weights", "cache"))
    assert running >= one.bytes(1, use.length) == 2048 * one.per_patch
    assert any("`model.visual`" in note and "2,048 patches (512 tokens)" in note for note in plan.memory.notes)


def test_an_image_is_no_longer_than_its_sequence_and_scores_grow_with_its_square() -> None:
    one = TowerPass("visual", 1000, 4, 10, 2)
    assert one.bytes(2, 1 << 20) == 2 * 1000 * (10 + 2 * 1000)
    assert one.bytes(3, 100) == 3 * 400 * (10 + 2 * 400)


@pytest.mark.parametrize(
    ("settings", "patches"),
    [
        ({"max_pixels": 256 * 100}, 100),
        ({"size": {"longest_edge": 160}}, 100),
        ({"size": {"height": 160, "width": 320}}, 200),
        ({"max_soft_tokens": 70}, 280),
        ({"max_patches": 3, "size": {"height": 160, "width": 160}}, 400),
        ({"max_image_size": 320}, 400),
        ({"max_pixels": -1, "size": 7}, 4096),
    ],
)
def test_the_largest_image_is_read_from_the_processor(settings: Any, patches: int, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    vision = SimpleNamespace(hidden_size=8, num_heads=2, patch_size=16, spatial_merge_size=2)
    source = SimpleNamespace(config=SimpleNamespace(vision_config=vision), folder=tmp_path)
    model = nn.ModuleDict({"visual": nn.Linear(2, 2)})
    model.dtype = torch.bfloat16  # pyright: ignore[reportAttributeAccessIssue]
    captured: Any = SimpleNamespace(source=source, towers=("visual",), model=model, facts={"hidden": 8})
    one = tower_pass(captured)
    assert one is not None and one.patches == patches
