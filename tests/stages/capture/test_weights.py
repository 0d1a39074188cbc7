"""From checkpoint names to places in the model: every naming style transformers reads, every misfit named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.checkpoint import open_index
from ktc.stages.capture.weights import WeightMap, map_weights


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twin.write("deepseek_v2", tmp_path_factory.mktemp("models"))


def on_meta(config: object) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def mapped(config: object, tensors: dict[str, Tensor], folder: Path) -> WeightMap:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return map_weights(on_meta(config), open_index(folder))


def refused(config: object, tensors: dict[str, Tensor], folder: Path) -> list[str]:
    with pytest.raises(InputRefused) as refusal:
        mapped(config, tensors, folder)
    return [f"{d.code} {d.message}" for d in refusal.value.diagnostics]


def test_per_expert_names_become_one_row_per_matrix(written: Path) -> None:
    weights = map_weights(on_meta(AutoConfig.from_pretrained(written)), open_index(written))
    assert weights.warnings == ()
    rows = {row.source_key: row for row in weights.sources}
    up = rows["model.layers.2.mlp.experts.13.up_proj.weight"]
    assert (up.target, up.expert, up.part) == ("model.layers.2.mlp.experts.gate_up_proj", 13, "up")
    assert (up.shape, up.dtype, up.transform) == ((48, 64), "bf16", "copy")
    assert rows["model.layers.0.mlp.down_proj.weight"].expert is None
    assert sum(row.expert is not None for row in weights.sources) == 2 * 16 * 3


def test_fused_names_are_taken_apart_by_the_loader(written: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(written)
    weights = mapped(model.config, dict(model.state_dict()), tmp_path)
    fused = {row.part: row for row in weights.sources if row.transform == "per_expert"}
    assert fused["gate_up"].shape == (16, 96, 64)
    assert fused["down"].target.endswith(".mlp.experts.down_proj")


def test_a_family_with_its_own_names_is_followed(tmp_path: Path) -> None:
    model = twin.build(twin.shrink(AutoConfig.for_model("mixtral")), seed=0)
    model.save_pretrained(tmp_path)
    rows = {row.source_key: row for row in map_weights(on_meta(model.config), open_index(tmp_path)).sources}
    row = rows["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    assert (row.target, row.expert, row.part) == ("model.layers.1.mlp.experts.gate_up_proj", 5, "up")


def test_tied_embeddings_are_not_demanded(tmp_path: Path) -> None:
    config = twin.shrink(AutoConfig.for_model("qwen3_moe", tie_word_embeddings=True))
    twin.build(config, seed=0).save_pretrained(tmp_path)
    targets = {row.target for row in map_weights(on_meta(config), open_index(tmp_path)).sources}
    assert "model.embed_tokens.weight" in targets
    assert "lm_head.weight" not in targets


@pytest.mark.parametrize(
    ("held", "warned"), [(("model.embed_tokens.weight",), False), (("lm_head.weight",), False), (None, True)]
)
def test_either_of_two_tied_tensors_will_do_and_both_are_told(
    held: tuple[str, ...] | None, warned: bool, tmp_path: Path
) -> None:
    config = twin.shrink(AutoConfig.for_model("qwen3_moe", tie_word_embeddings=True))
    twin.build(config, seed=0).save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    table = tensors.pop("model.embed_tokens.weight")
    both = ("model.embed_tokens.weight", "lm_head.weight")
    weights = mapped(config, {**tensors, **{name: table.clone() for name in held or both}}, tmp_path)
    (row,) = [row for row in weights.sources if row.target in both]
    assert (row.target, row.source_key) == (both[0], (held or both)[0])
    assert [d.code for d in weights.warnings] == ["I118"] * warned


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def replace(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (drop("model.norm.weight"), "I115 the checkpoint lacks `model.norm.weight` ([64], float)"),
        (
            drop("model.layers.1.mlp.experts.3.gate_proj.weight"),
            "I115 the checkpoint lacks the gate projection of expert 3 of `model.layers.1.mlp.experts.gate_up_proj`",
        ),
        (
            replace("model.layers.1.mlp.experts.3.down_proj.weight", torch.zeros(64, 47)),
            "I116 tensor `model.layers.1.mlp.experts.3.down_proj.weight` in `model.safetensors` has shape [64, 47]",
        ),
        (
            replace("model.layers.1.mlp.experts.16.down_proj.weight", torch.zeros(64, 48)),
            "I116 tensor `model.layers.1.mlp.experts.16.down_proj.weight` is of expert 16; the config has 16 experts",
        ),
        (
            replace("lm_head.weight", torch.zeros(512, 64, dtype=torch.float8_e4m3fn)),
            "I117 tensor `lm_head.weight` has no scales: the checkpoint lacks `lm_head.weight_scale_inv`",
        ),
        (
            replace("model.layers.1.mlp.experts.down_proj", torch.zeros(16, 64, 48)),
            "I119",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    written: Path, tmp_path: Path, damage: Callable[[dict[str, Tensor]], object], expected: str
) -> None:
    tensors = tensors_of(written)
    damage(tensors)
    problems = refused(AutoConfig.from_pretrained(written), tensors, tmp_path)
    assert len(problems) == 1
    assert problems[0].startswith(expected)


def test_many_problems_are_counted_and_not_all_listed(written: Path, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tensors_of(written).items() if ".experts." not in name}
    tensors["model.layers.1.mlp.experts.0.down_proj.weight"] = torch.zeros(64, 48)
    problems = refused(AutoConfig.from_pretrained(written), tensors, tmp_path)
    assert "I115 the checkpoint lacks `model.layers.1.mlp.experts.gate_up_proj` ([16, 96, 64], float)" in problems
    assert "lacks the down projection of expert 15" in problems[15]


def test_experts_that_layers_share_are_named_and_not_called_missing(tmp_path: Path) -> None:
    folder = twin.write("qwen3_moe", tmp_path / "whole")
    config, tensors = AutoConfig.from_pretrained(folder), tensors_of(folder)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.1.mlp.experts")}
    save_file(kept, tmp_path / "model.safetensors")
    model, index = on_meta(config), open_index(tmp_path)
    first, second = (layer.mlp for layer in model.model.layers[:2])
    for name in ("gate_up_proj", "down_proj"):
        setattr(second.experts, name, getattr(first.experts, name))
    with pytest.raises(InputRefused) as error:
        map_weights(model, index)
    found = [problem for problem in error.value.diagnostics if problem.code == "I119"]
    assert len(found) == len(error.value.diagnostics) == 2
    assert "`model.layers.0.mlp.experts.gate_up_proj` under a second name" in found[0].message
    second.experts = first.experts  # one module at two places is filled once
    assert not map_weights(model, index).warnings


def test_tensors_without_a_place_are_a_warning(written: Path, tmp_path: Path) -> None:
    tensors = {**tensors_of(written), "model.extra.weight": torch.zeros(2)}
    weights = mapped(AutoConfig.from_pretrained(written), tensors, tmp_path)
    assert [(d.code, d.severity) for d in weights.warnings] == [("I118", "warning")]
    assert "`model.extra.weight`" in weights.warnings[0].message
