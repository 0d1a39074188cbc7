"""Models that read images: compiled whole by their stock class, equal to stock with pixels, or as text alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from stacked_training import assert_alike, trained
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

import ktc
from census.checkpoints import whole_config
from ktc.diagnostics import InputRefused
from ktc.model.hf.stock_model import (
    finds_positions,
    forget_positions,
    has_towers,
    left_out_bytes,
    multimodal_class,
    parameter_bytes,
    text_tower,
)
from ktc.model.manifest.manifest import read_manifest
from ktc.model.twin import build, default_config, shrink, whole_families, with_image
from ktc.stages.capture import ModelSource, capture, open_model
from ktc.stages.proof.whole import whole_difference

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")


def small(family: str) -> Any:
    return build(shrink(default_config(family, whole=True)), seed=0)


def checkpoint(family: str, folder: Path) -> Path:
    small(family).to(torch.bfloat16).save_pretrained(folder)
    return folder


def question(model: Any, seed: int, before: int) -> dict[str, torch.Tensor]:
    """Return a prompt with an image made on the spot, by the image processor of the family."""
    config, vision = model.config, model.config.vision_config
    pixels = np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size, merge_size=vision.spatial_merge_size, max_pixels=128 * 128, min_pixels=32 * 32,
        temporal_patch_size=vision.temporal_patch_size,
    )  # fmt: skip
    image: dict[str, torch.Tensor] = dict(processor(images=[Image.fromarray(pixels)], return_tensors="pt"))
    count = int(image["image_grid_thw"].prod()) // vision.spatial_merge_size**2
    ids = torch.tensor([[*range(5, 5 + before), *[config.image_token_id] * count, 20, 21, 22]])
    kinds = (ids == config.image_token_id).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **image}


def beside(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return two prompts as a batch, filled up on the left."""
    length = max(first["input_ids"].shape[1], second["input_ids"].shape[1])

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (length - tensor.shape[1], 0))

    pixels = ("pixel_values", "image_grid_thw")
    return {
        name: torch.cat([first[name], second[name]] if name in pixels else [wide(first[name]), wide(second[name])])
        for name in first
    }


def test_a_config_that_names_a_class_of_images_is_the_whole_model() -> None:
    whole = shrink(default_config("qwen3_5_moe", whole=True))
    assert getattr(multimodal_class(whole), "__name__", "") == "Qwen3_5MoeForConditionalGeneration"
    whole.architectures = ["Qwen3_5MoeForCausalLM"]  # as `--text-only` chooses
    assert multimodal_class(whole) is None
    alone = shrink(default_config("qwen3_vl_moe", whole=True))
    alone.architectures = None
    assert multimodal_class(alone) is not None  # no causal LM takes this config
    assert multimodal_class(shrink(default_config("qwen3_moe"))) is None


def test_only_models_with_positions_of_several_axes_find_them_by_images() -> None:
    families = ("qwen3_vl_moe", "qwen3_5_moe", "gemma4", "llama4", "kimi_k25")
    assert [finds_positions(small(family)) for family in families] == [True, True, False, False, False]


def test_the_layers_of_a_whole_model_are_those_of_its_text() -> None:
    model = small("qwen3_vl_moe")
    assert has_towers(model)
    assert text_tower(model) is model.model.language_model
    assert text_tower(text := build(shrink(default_config("qwen3_moe")), 0)) is text


def test_an_image_for_a_twin_changes_what_it_answers() -> None:
    model, tokens = small("qwen3_vl_moe"), torch.arange(5, 15)[None]
    with torch.no_grad():
        first, second = (model(**with_image(model, tokens, seed)).logits for seed in (0, 1))
    assert first.shape[1] > tokens.shape[1]
    assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-3)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_vl_moe", "it has no class for that"),
        ("kimi_k25", "`DeepseekV3ForCausalLM` is of checkpoints of `deepseek_v3`"),
        ("qwen3_moe", "a model of text already"),
        ("mistral4", "a model of text already"),  # among the classes of images and text, without a part for images
    ],
)
def test_text_only_is_refused_where_nothing_can_be_left_out(family: str, reason: str, tmp_path: Path) -> None:
    shrink(default_config(family, whole=True)).save_pretrained(tmp_path)
    with pytest.raises(InputRefused, match=f"I123.*{reason}"):
        open_model(tmp_path, text_only=True)


def test_every_stage_reads_the_text_alone(tmp_path: Path) -> None:
    shrink(default_config("qwen3_5_moe", whole=True)).save_pretrained(tmp_path)
    (dump,) = ktc.compiler.dumps(tmp_path, "moe-lora", ["captured"], text_only=True)
    assert dump.blocks
    assert not any("language_model" in site for block in dump.blocks for site in block.sites)
    (refused,) = ktc.check("moe-lora", small("qwen3_moe"), text_only=True)
    assert refused.code == "I123"


def test_towers_that_cannot_be_built_have_no_known_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = shrink(default_config("qwen3_5_moe", whole=True))
    config.architectures = ["Qwen3_5MoeForCausalLM"]
    text, whole = build(copy.deepcopy(config), seed=0), small("qwen3_5_moe")
    assert left_out_bytes(text, config) == parameter_bytes(whole) - parameter_bytes(text)
    config.vision_config.num_heads = 0
    assert left_out_bytes(text, config) == 0
    assert "their size is not known" in caplog.text


def test_a_proof_without_images_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = small("qwen3_vl_moe")
    vars(model.config)["image_token_id"] = None
    assert whole_difference(model, model, 0, lambda: (model, model)) == (0.0, "")
    assert [record.message for record in caplog.records if "takes no image" in record.message] == [
        "the twin of `Qwen3VLMoeForConditionalGeneration` takes no image that ktc makes: none is compared"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_answers_about_images_as_stock_and_trains(family: str, tmp_path: Path) -> None:
    stock: Any = AutoModelForImageTextToText.from_pretrained(checkpoint(family, tmp_path / "m"), dtype=torch.float32)
    out = ktc.compile(tmp_path / "m", "moe-lora", tmp_path / "whole", settings={"device": "cpu"})
    one, two = question(stock, 1, before=3), question(stock, 2, before=9)
    text = {"input_ids": torch.arange(30, 45)[None], "attention_mask": torch.ones(1, 15, dtype=torch.long)}
    model: Any = ktc.load(out, reference=True)
    for inputs in (one, two, beside(one, two), text):  # one prompt with two images has two answers
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, rtol=0, atol=1e-4)
        answers: Any = (m.generate(**inputs, max_new_tokens=8, do_sample=False) for m in (model, stock))
        assert torch.equal(*answers)
    by_name: Any = AutoModelForImageTextToText.from_pretrained(out, trust_remote_code=True)
    by_kernels: Any
    for by_kernels in (ktc.load(out), ktc.load(out, random_weights=3), by_name):
        assert type(by_kernels).__name__ == type(stock).__name__
        rounded = {name: t.bfloat16() if t.is_floating_point() else t for name, t in one.items()}
        assert by_kernels.generate(**rounded, max_new_tokens=4, do_sample=False).shape[1] > one["input_ids"].shape[1]
    assert not json.loads((out / "ktc.json").read_text())["cuda_graph"]
    _train_alike(model, stock, one, tmp_path)


def _train_alike(model: Any, stock: Any, inputs: dict[str, torch.Tensor], folder: Path) -> None:
    """Train both with an adapter on an image, and load the adapter of ktc into stock."""
    losses: list[list[float]] = []
    tuned: list[Any] = []
    for base in (model, stock):
        torch.manual_seed(0)
        named = r".*language_model.*\.(q_proj|k_proj|v_proj|q_a_proj|q_b_proj|kv_b_proj|o_proj)"
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules=named)).train()
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for _ in range(3):
            loss = adapted(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
        tuned.append(adapted.eval())
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][-1] < losses[0][0]
    tuned[0].save_pretrained(folder / "adapter")
    with torch.no_grad():
        wanted = tuned[0](**inputs).logits
        loaded = PeftModel.from_pretrained(tuned[1].unload(), folder / "adapter").eval()
        torch.testing.assert_close(loaded(**inputs).logits, wanted, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_text_only_leaves_the_towers_out_and_says_what_it_saves(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_moe", tmp_path / "m")
    out = ktc.compile(folder, "moe-lora", tmp_path / "text", settings={"device": "cpu"}, text_only=True)
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model: Any = ktc.load(out, reference=True)
    with torch.no_grad():
        given = {"input_ids": torch.arange(9)[None]}
        torch.testing.assert_close(model(**given).logits, stock(**given).logits, rtol=0, atol=1e-4)
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    saved = sum(p.nbytes for p in whole.parameters()) - sum(p.nbytes for p in stock.bfloat16().parameters())
    manifest = read_manifest(out)
    assert manifest.model.left_out_bytes == saved > 0
    assert "--text-only" in manifest.renewal(out)


@pytest.mark.slow
def test_native_steps_and_stacked_micro_batches_of_a_model_with_towers_are_its_own(tmp_path: Path) -> None:
    folder = checkpoint("gemma4", tmp_path / "m")
    out = ktc.compile(folder, "moe-inference", tmp_path / "answers", settings={"device": "cpu"})
    model: Any = ktc.load(out)
    text = {"input_ids": torch.arange(30, 45)[None], "attention_mask": torch.ones(1, 15, dtype=torch.long)}
    for inputs in (text, with_image(model, torch.arange(5, 25)[None], seed=0)):
        options: dict[str, Any] = {**inputs, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        graphs, model.decode_graphs = model.decode_graphs, None
        wanted = model.generate(**options)
        model.decode_graphs = graphs
        assert graphs is not None
        assert torch.equal(model.generate(**options), wanted)
    out = ktc.compile(folder, "moe-lora", tmp_path / "tuned", settings={"device": "cpu"})
    assert_alike(*(trained(out, tmp_path / mode, mode) for mode in ("on", "off")), tolerance=1e-5)


# No images, no token that stands for one, a generation of its own, and code that needs scipy.
WITHOUT_IMAGES = ("mistral4", "nemotron_h_omni", "diffusion_gemma", "inkling_mm_model")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in whole_families() if name not in WITHOUT_IMAGES])
def test_the_twins_of_other_families_read_images_in_the_proof(family: str) -> None:
    model: Any = build(shrink(whole_config(family)), seed=0)
    given = with_image(model, torch.arange(5, 15)[None], seed=0)
    answer = model.generate(**given, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert answer.shape[1] == given["input_ids"].shape[1] + 2
    assert multimodal_class(model.config) is type(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4", "kimi_k25", "step3p7", "ernie4_5_vl_moe"])
def test_checkpoints_of_other_families_answer_about_images_as_stock_and_train(family: str, tmp_path: Path) -> None:
    model: Any = build(shrink(whole_config(family)), seed=0).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    stock: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    out = ktc.compile(tmp_path / "m", "moe-lora", tmp_path / "whole", settings={"device": "cpu"})
    ours: Any = ktc.load(out, reference=True)
    given = with_image(stock, torch.arange(5, 15)[None], seed=0)
    with torch.no_grad():
        torch.testing.assert_close(ours(**given).logits, stock(**given).logits, rtol=0, atol=1e-4)
    _train_alike(ours, stock, given, tmp_path)


def test_a_model_with_a_generation_of_its_own_is_refused_by_name() -> None:
    config = shrink(default_config("diffusion_gemma", whole=True))
    with pytest.raises(InputRefused, match="DiffusionGemmaForBlockDiffusion"):
        capture(ModelSource("m", None, config, None))


def test_positions_of_a_former_prompt_are_forgotten() -> None:
    model: Any = build(shrink(whole_config("qwen3_omni_moe_thinker")), seed=0)
    tokens = torch.arange(5, 35).reshape(3, 10)
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        forget_positions(model)
        cache = model(input_ids=tokens[:2], use_cache=True).past_key_values
        model(input_ids=tokens[:2, :1], past_key_values=cache)  # of two rows, after three
    assert not any(getattr(module, "rope_deltas", None) is not None for module in model.modules())


def test_the_sizes_of_a_tower_keep_their_relations() -> None:
    config: Any = shrink(whole_config("llama4"))
    assert config.vision_config.intermediate_size == 4 * config.vision_config.hidden_size
    dots: Any = shrink(whole_config("dots3_note")).vision_config
    assert dots.adapter_in_dim == dots.hidden_size
    muse: Any = shrink(whole_config("muse_spark"))
    assert muse.out_hidden_size == 4 * muse.vision_config.hidden_size
    sections = shrink(whole_config("ernie4_5_vl_moe")).get_text_config().rope_parameters["mrope_section"]
    assert sections[0] == sections[1] and sum(sections) == 8
