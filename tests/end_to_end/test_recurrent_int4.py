"""INT4 projections around a recurrent core that keeps its own code, loaded with kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ktc
from ktc.model import twin
from ktc.model.checkpoint.int4 import fake_quantised
from ktc.model.graph.typed import named_modules

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
IDS = torch.arange(3, 40)[None]
PROGRAM = """
import "std/attention.ktr" as attn
rule projections {
  match attn.recurrent as a
  => kt_linear(auto, prefill = packed) on a.inputs, a.o
  => quantize(int4, group = -1) on a.inputs, a.o
}
"""


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def test_rounded_projections_compute_what_stock_does_with_the_rounded_weights(tmp_path: Path) -> None:
    model = twin.build(twin.shrink(twin.default_config("lfm2_moe")), seed=1, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "int4.ktr").write_text(PROGRAM)
    out = ktc.compile(tmp_path / "model", tmp_path / "int4.ktr", tmp_path / "out")
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    for name, module in named_modules(stock):
        if isinstance(module, nn.Linear) and name.endswith(("conv.in_proj", "conv.out_proj")):
            module.weight.data = fake_quantised(module.weight.data, -1)
    exact, unrounded = logits(stock.float()), logits(ktc.load(out, reference=True))
    assert (unrounded - exact).norm() <= 1e-5 * exact.norm()
    assert (logits(ktc.load(out)) - exact).norm() <= 0.1 * exact.norm()
