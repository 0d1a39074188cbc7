"""Which models read images: text models with code of their own are not among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktc.model.hf.processor import may_read_images


@pytest.mark.parametrize(
    ("config", "files", "wanted"),
    [
        ({"model_type": "own_text"}, (), False),
        ({"model_type": "own_text", "vision_config": {"depth": 1}}, (), True),
        ({"model_type": "own_text"}, ("preprocessor_config.json",), True),
    ],
)
def test_own_code_reads_images_where_it_comes_with_the_parts(
    config: dict[str, Any], files: tuple[str, ...], wanted: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in files:
        (tmp_path / name).write_text("{}")
    assert may_read_images(tmp_path, "OwnForCausalLM", own_code=True) == wanted
    assert may_read_images(tmp_path, "Qwen3VLMoeForConditionalGeneration", own_code=False)
    assert not may_read_images(tmp_path, "Qwen3MoeForCausalLM", own_code=False)
