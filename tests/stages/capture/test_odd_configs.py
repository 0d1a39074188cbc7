"""A config with numbers that no model has is refused before anything is built, or means nothing; so is foreign code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from families import CPU, captured, config_of
from places import REMOTE_CODE

from ktc.diagnostics import InputRefused
from ktc.language import dsl
from ktc.model.hf import remote_code
from ktc.stages.capture import ModelSource, capture, open_model
from ktc.stages.match import match
from ktc.stages.plan import BatchShape, make_plan
from ktc.stages.plan.types import Workload

ORCHARD = REMOTE_CODE / "orchard"


def refusal(folder: Path, content: dict[str, Any], *, trusted: bool = False) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputRefused) as caught:
        open_model(folder, trust_remote_code=trusted)
    return str(caught.value)


@pytest.mark.parametrize(
    "odd",
    [
        {"num_hidden_layers": 1_000_000},
        {"num_hidden_layers": 10**400},
        {"num_hidden_layers": 1e9},
        {"num_experts": 10_000_000},
        {"text_config": {"num_local_experts": 1 << 40}},
    ],
)
def test_more_layers_or_experts_than_any_model_has_are_not_built(tmp_path: Path, odd: dict[str, Any]) -> None:
    said = refusal(tmp_path, {"model_type": "qwen3_moe", **odd})
    assert "I103" in said
    assert "num_" in said


def test_code_of_a_folder_is_not_run_for_such_a_config(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ORCHARD, tmp_path / "orchard"))
    content = json.loads((folder / "config.json").read_text())
    assert "I103" in refusal(folder, {**content, "num_hidden_layers": 1_000_000}, trusted=True)


@pytest.mark.parametrize(
    "reference", ["../outside.Orchard", "/outside.Orchard", "linked/outside.Orchard", "none.Orchard"]
)
def test_code_that_is_not_below_its_folder_is_not_run(tmp_path: Path, reference: str) -> None:
    folder = Path(shutil.copytree(ORCHARD, tmp_path / "orchard"))
    beside = tmp_path / "beside"
    beside.mkdir()
    for path in (tmp_path / "outside.py", beside / "outside.py"):
        path.write_text("raise SystemExit('this code was run')\n")
    (folder / "linked").symlink_to(beside)
    reference = f"{tmp_path}{reference}" if reference.startswith("/") else reference
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"]["AutoModelForCausalLM"] = reference
    assert "I109" in refusal(folder, content, trusted=True)


def test_code_in_folders_below_counts_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("a.py", "sub/a.py", "sub/deep/b.py"):
        (tmp_path / name).write_text(name)
    found = remote_code.code_files(tmp_path)
    assert list(found) == ["a.py", "sub/a.py", "sub/deep/b.py"]
    assert len(set(found.values())) == 3


def test_a_class_that_shares_its_name_with_one_of_transformers_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as capture sees it: transformers runs its `__init__` again when a model is first loaded, and is two modules then
    monkeypatch.setattr(
        "ktc.stages.capture.model.transformers.Qwen3MoeForCausalLM", type("Qwen3MoeForCausalLM", (), {})
    )
    with pytest.raises(InputRefused, match="I109"):
        capture(ModelSource("odd", tmp_path, config_of("qwen3_moe"), None))


def generation(limit: object) -> Workload:
    model, rules = captured("qwen3_moe"), dsl.load("moe-lora", {})
    text = model.source.config.get_text_config()
    before, vars(text)["max_position_embeddings"] = text.max_position_embeddings, limit  # past what the class checks
    try:
        return make_plan(model, (), match(model, rules, CPU), rules, CPU, BatchShape()).memory.workloads[-1]
    finally:
        vars(text)["max_position_embeddings"] = before


@pytest.mark.parametrize("limit", [-1, 0, None, True, 2.5, "abc", 10**400])
def test_a_number_of_positions_that_means_nothing_limits_nothing(limit: Any) -> None:
    assert generation(limit).max_length > generation(100).max_length == 100


def test_a_router_that_chooses_no_expert_is_refused() -> None:
    model = captured("qwen3_moe", num_experts_per_tok=0)
    rules = dsl.load("moe-lora", {})
    with pytest.raises(InputRefused, match="M074"):
        make_plan(model, (), match(model, rules, CPU), rules, CPU, BatchShape())


def test_a_config_alone_says_that_its_weights_cannot_be_read(tmp_path: Path) -> None:
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    text = refusal(tmp_path, {**config_of("qwen3_moe").to_dict(), "quantization_config": quantised})
    assert "I117" in text
    assert "`bitsandbytes`" in text
