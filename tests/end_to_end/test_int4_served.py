"""INT4 checkpoints as they are served: calibrated ones beside stock, and new weights in a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_twins import calibrated
from other_weights import rewritten
from torch import Tensor
from transformers import AutoModelForCausalLM

import ktc
from ktc.diagnostics import InputRefused
from ktc.inference.quantize.checkpoint import quantize
from ktc.inference.quantize.scheme import SCHEMES
from ktc.model import twin
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(3, 40)[None]
ROUNDED = """
import "std/moe.ktr"
import "std/attention.ktr" as attn
rule experts   { match moe.block as m => cpu_moe() => fake_quant(int4) on m.experts }
rule attention { match attn.gqa as a  => fake_quant(int4, group = -1) on a.q, a.o }
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    config = twin.shrink(twin.default_config("qwen3_moe"))
    vars(config).update({"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 16})
    twin.build(config, seed=5, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def stock_of(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


@pytest.mark.parametrize(
    ("dtype", "symmetric", "told"),
    [
        pytest.param(torch.float16, False, "int4 in groups of 128 and zero points", id="awq"),
        # Its scales are of the grid, as those of ktc's own checkpoints.
        pytest.param(torch.bfloat16, True, "int4 in groups of 128", id="gptq", marks=pytest.mark.slow),
    ],
)
def test_a_calibrated_checkpoint_has_the_logits_of_stock(
    checkpoint: Path, dtype: torch.dtype, symmetric: bool, told: str, tmp_path: Path
) -> None:
    coded, plain = calibrated(checkpoint, tmp_path, dtype, 128, symmetric)
    plan = ktc.inspect(coded, "moe-inference").plan
    reasons = {reason.text for reason in plan.reasons if reason.path.endswith("experts")}
    assert any(text.startswith(f"stored as {told}") and text.endswith("as stored") for text in reasons), reasons
    formats = {spec.formats for spec in plan.kernels if isinstance(spec, FusedMoeSpec)}
    assert formats == {("int4",) if symmetric else ("uint4_g128",)}
    out = ktc.compile(coded, "moe-inference", tmp_path / "out")
    exact, rounded = logits(stock_of(plain, torch.float32)), logits(stock_of(plain, dtype))
    if symmetric:  # stock transformers has no zero points of experts
        assert torch.equal(logits(stock_of(coded, dtype)), rounded)
    assert (logits(ktc.load(out, reference=True)) - exact).norm() <= 1e-5 * exact.norm()
    own = (rounded - exact).norm()
    assert (logits(ktc.load(out)) - rounded).norm() <= 3 * own


def assert_refreshed(out: Path, first: Path, other: Path) -> None:
    """New weights are those of a load, and the old ones come back, bit for bit, at the same addresses."""
    model: Any = ktc.load(out)
    before, places = logits(model), [each.data_ptr() for each in model.parameters()]
    model.refresh(other)
    assert torch.equal(logits(model), logits(ktc.load(out, weights=other)))
    assert not torch.equal(logits(model), before)
    model.refresh(first)
    assert torch.equal(logits(model), before)
    assert [each.data_ptr() for each in model.parameters()] == places


def test_new_int4_weights_are_those_of_a_load(checkpoint: Path, tmp_path: Path) -> None:
    other = rewritten(checkpoint, tmp_path / "other")

    def int4(source: Path, name: str, scheme: str = "int4-g32") -> Path:
        return quantize(source, tmp_path / name, SCHEMES[scheme], "linears").path

    first, second = int4(checkpoint, "first"), int4(other, "second")
    out = ktc.compile(first, "moe-inference", tmp_path / "out")
    assert_refreshed(out, first, second)
    model: Any = ktc.load(out)
    before = logits(model)
    for wrong, why in ((other, "L406"), (int4(other, "g64", "int4-g64"), "L405")):
        assert_refused(lambda folder=wrong: model.refresh(folder), why)
        assert torch.equal(logits(model), before)


@pytest.mark.slow
def test_new_weights_are_rounded_to_the_grid_of_the_program(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "rounded.ktr").write_text(ROUNDED)
    out = ktc.compile(checkpoint, tmp_path / "rounded.ktr", tmp_path / "out")
    assert_refreshed(out, checkpoint, rewritten(checkpoint, tmp_path / "other"))


def assert_refused(call: Callable[[], object], code: str) -> None:
    with pytest.raises(InputRefused) as refusal:
        call()
    assert refusal.value.diagnostics[0].code == code
