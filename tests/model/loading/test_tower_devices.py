"""A tower on a device of its own answers as stock: pixels go to it, and its features to the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import ktc
from census.checkpoints import whole_config
from ktc.model.manifest.manifest import read_manifest
from ktc.model.twin import build, shrink, with_image

RULES = """
import "std/moe.ktr"
rule experts {{ match moe.opaque as m => cpu_moe on m.experts }}
rule all     {{ match module at "*" => place({rest}) }}
rule eyes overrides all {{ match module as m at "*", "model.*" where m.tower => place({towers}) }}
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rest", "towers"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gemma4", "kimi_k25", "llama4"])
def test_towers_beside_the_language_model_answer_as_stock(family: str, rest: str, towers: str, tmp_path: Path) -> None:
    model: Any = build(shrink(whole_config(family)), seed=0).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    stock: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    program = tmp_path / "eyes.ktr"
    program.write_text(RULES.format(rest=rest, towers=towers))
    out = ktc.compile(tmp_path / "m", program, tmp_path / "out")
    assert towers in {device for fqn, device in read_manifest(out).placement.items() if fqn}
    ours: Any = ktc.load(out)
    given = with_image(stock, torch.arange(5, 25)[None], seed=0)
    device = ours.get_input_embeddings().weight.device
    assert device.type == rest.partition(":")[0]
    here = {n: v.to(device, torch.bfloat16 if v.is_floating_point() else v.dtype) for n, v in given.items()}
    with torch.no_grad():
        wanted, found = stock(**given).logits, ours(**here).logits.float().cpu()
    other = with_image(stock, torch.arange(5, 25)[None], seed=1)
    with torch.no_grad():
        far = stock(**other).logits
    # In bf16 a near tie of the router may choose another expert for a token: the median says more than the sum.
    assert _apart(found, wanted) < min(0.05, 0.2 * _apart(far, wanted))
    assert ours.generate(**here, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == found.shape[1] + 3


def _apart(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the median relative difference of the logits (1, t, vocabulary) of a token."""
    return float(((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())
