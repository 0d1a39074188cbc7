"""Stacks of experts become INT4 matrices that ktc, and stock transformers where it can, read as the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import image_checkpoint
from peft import get_peft_model
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig, PreTrainedModel

import ktc
from ktc.adapters.base_model import read_base
from ktc.diagnostics import InputRefused
from ktc.inference.quantize.checkpoint import QuantisedCheckpoint, quantize
from ktc.inference.quantize.scheme import SCHEMES
from ktc.model import twin
from ktc.model.checkpoint.index import open_index
from ktc.model.checkpoint.int4 import fake_quantised
from ktc.model.loading.peft_glue import read_lora_config
from ktc.model.packed_store.weight_store import fill
from ktc.stages.capture.weights import map_weights

pytestmark = pytest.mark.usefixtures("one_thread")
ROW = SCHEMES["int4-channel"]
IDS = torch.arange(3, 40)[None]
COLUMNS = ("llama4", "aria")  # whose stacks are (experts, in, out)
FAMILIES = ("qwen3_vl_moe", "llama4", "gemma4", "granitemoe", "step3p7", "aria", "inkling2", "muse_spark")
CASES = [pytest.param(name, marks=() if name in FAMILIES[:4] else pytest.mark.full) for name in FAMILIES]


def stacked(family: str, folder: Path) -> PreTrainedModel:
    config = twin.shrink(twin.default_config(family, whole=family != "granitemoe"))
    model = twin.build(config, seed=5, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


def rounded(model: nn.Module, columns: bool) -> dict[str, Tensor]:
    """The tensors of the model, experts rounded with a scale per output."""
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for name, tensor in tensors.items():
        if ".experts." in name and tensor.dim() == 3:
            rows = (tensor.mT if columns else tensor).contiguous()
            on_grid = fake_quantised(rows.flatten(0, 1), -1).view(rows.shape)
            tensors[name] = on_grid.mT if columns else on_grid
    return tensors


def filled(folder: Path) -> dict[str, Tensor]:
    """The tensors that ktc makes of a checkpoint for the family's stock class."""
    model, index = read_base(folder).model, open_index(folder)
    fill(model, map_weights(model, index).sources, index, {"": "cpu"})
    return dict(model.state_dict())


@pytest.mark.parametrize("family", CASES)
def test_stacks_become_matrices_that_ktc_reads(family: str, tmp_path: Path) -> None:
    model = stacked(family, tmp_path / "model")
    done = quantize(tmp_path / "model", tmp_path / "int4", ROW)
    wanted, found = rounded(model, family in COLUMNS), filled(done.path)
    assert done.stacks >= 4
    assert done.bytes_after < done.bytes_before
    assert any(not torch.equal(wanted[name], each) for name, each in model.state_dict().items())
    assert [
        name for name, each in wanted.items() if not found[name].is_meta and not torch.equal(each, found[name])
    ] == []
    assert not any(name.endswith("_packed") and (".visual." in name or "vision" in name) for name in names(done))


def names(done: QuantisedCheckpoint) -> list[str]:
    return [name for file in done.path.glob("*.safetensors") for name in load_file(file)]


def hub_stacks(folder: Path) -> Path:
    """A checkpoint of Qwen3.5 as its makers publish it: stacks, which transformers saves expert by expert."""
    model = stacked("qwen3_5_moe", folder)
    save_file({n: each.contiguous() for n, each in model.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["qwen3_5_moe", pytest.param("llama4", marks=pytest.mark.slow)])
def test_stock_transformers_loads_them_where_it_knows_single_experts(family: str, tmp_path: Path) -> None:
    if family == "qwen3_5_moe":
        hub_stacks(tmp_path / "model")
    else:
        stacked(family, tmp_path / "model")
    done = quantize(tmp_path / "model", tmp_path / "int4", ROW)
    assert done.loads_in_transformers
    assert done.stacks >= 4
    auto: Any = AutoModelForImageTextToText
    original = auto.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    original.load_state_dict(rounded(original, family in COLUMNS))
    settings = CompressedTensorsConfig(dequantize=True)
    stock = auto.from_pretrained(done.path, dtype=torch.bfloat16, quantization_config=settings)
    with torch.no_grad():
        assert torch.equal(stock(input_ids=IDS).logits, original(input_ids=IDS).logits)


def test_families_without_such_names_are_told(tmp_path: Path) -> None:
    stacked("gemma4", tmp_path / "model")
    assert not quantize(tmp_path / "model", tmp_path / "int4", ROW).loads_in_transformers
    stacked("gpt_oss", tmp_path / "alternating")
    with pytest.raises(InputRefused, match="rows of gate and up alternate") as refusal:
        quantize(tmp_path / "alternating", tmp_path / "out", ROW)
    assert {each.code for each in refusal.value.diagnostics} == {"Q502"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "llama4"])
def test_a_compiled_model_answers_and_learns_from_them(family: str, tmp_path: Path) -> None:
    if family == "llama4":
        stacked(family, tmp_path / "model")
    else:
        image_checkpoint(family, tmp_path / "model")
    done = quantize(tmp_path / "model", tmp_path / "int4", ROW, "linears")
    stock: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    stock.load_state_dict({name: each for name, each in filled(done.path).items() if not each.is_meta})
    out = ktc.compile(done.path, "moe-lora", tmp_path / "out", settings={"device": "cpu"})
    wanted = logits(stock)
    assert (logits(ktc.load(out, reference=True)) - wanted).norm() < 1e-5 * wanted.norm()
    model: Any = ktc.load(out)
    assert (logits(model) - wanted).norm() < 0.1 * wanted.norm()
    tuned: Any = get_peft_model(model, read_lora_config(out))
    tuned(input_ids=IDS, labels=IDS).loss.backward()
    factors = [each for name, each in tuned.named_parameters() if "lora_B" in name]
    assert factors
    assert all(each.grad is not None and bool(each.grad.any()) for each in factors)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()
