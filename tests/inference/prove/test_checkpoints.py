"""`ktc prove` on other checkpoints: quantised kernels, GGUF files, code of the model's own with experts in a list."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf_twins
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from places import REMOTE_CODE
from quantised_twins import twin_of
from safetensors.torch import save_file

import ktc
from ktc.diagnostics import InputRefused
from ktc.foundation.host import find_compiler
from ktc.inference.prove.report import Report
from ktc.inference.prove.run import Request, prove_model
from ktc.model import twin
from ktc.model.experts.module import FusedMoe
from ktc.model.packed_store import packed_file, packed_store
from ktc.stages.capture import open_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module", autouse=True)
def _modules_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        yield


def compiled(model: Path, trusted: bool = False, **settings: str) -> Path:
    return ktc.compile(
        model, "moe-lora", model.parent / "out", settings={"device": "cpu", **settings}, trust_remote_code=trusted
    )


def damaged(out: Path, layer: int, trusted: bool = False) -> Path:
    """Pack the model and exchange the bytes of experts 1 and 2."""
    ktc.pack(out, trust_remote_code=trusted)
    model = ktc.load(out, trust_remote_code=trusted)
    (fqn,) = (name for name, one in model.named_modules() if isinstance(one, FusedMoe) and f".{layer}." in name)
    path = out / "packed" / packed_store.file_name(fqn)
    header = packed_file.read_header(path)
    size = header.packed_bytes // header.num_experts
    content = bytearray(path.read_bytes())
    first, second, end = (packed_file.DATA + expert * size for expert in (1, 2, 3))
    content[first:end] = content[second:end] + content[first:second]
    path.write_bytes(content)
    return out


def assert_clean(report: Report) -> None:
    rows = [row for layer in report.layers for row in layer.rows]
    assert not report.red, [row for row in rows if row.red]
    assert any(row.kind == "experts" for row in rows)
    assert all(row.ktc is not None and row.ktc < 0.03 for row in rows)


def wrong_experts(report: Report) -> set[int]:
    (row,) = (row for layer in report.layers for row in layer.rows if row.kind == "experts" and row.red)
    return {worst.index for worst in row.worst}


@pytest.mark.parametrize("form", ["int8", "int4", "q8_0", "fp8"])
def test_a_kernel_that_quantises_is_measured_by_its_formats_reference(tmp_path: Path, form: str) -> None:
    twin_of("deepseek_v3", tmp_path / "model", moe_intermediate_size=128, hidden_size=128)
    out = compiled(tmp_path / "model", format=form)
    report = prove_model(Request(out, count=64))
    assert_clean(report)
    costs = [row.format_error for layer in report.layers for row in layer.rows if row.kind == "block"]
    assert any(cost is not None and cost > 0.002 for cost in costs)
    assert wrong_experts(prove_model(Request(damaged(out, 1), count=64))) == {1, 2}


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q6_K])
def test_a_gguf_file_is_compared_by_its_rows(tmp_path: Path, kind: Type) -> None:
    inter = {"moe_intermediate_size": 256, "hidden_size": 256} if kind == Type.Q6_K else {}
    folder = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=kind, rest=Type.Q8_0, **inter).folder
    out = compiled(folder)
    report = prove_model(Request(out, count=64))
    assert report.stock_read == "rows"
    assert_clean(report)
    assert wrong_experts(prove_model(Request(damaged(out, 1), count=64))) == {1, 2}


@pytest.mark.parametrize("loop", ["hit"])
def test_experts_in_a_list_of_a_models_own_code_are_compared(tmp_path: Path, loop: str) -> None:
    folder = tmp_path / "orchard"
    shutil.copytree(REMOTE_CODE / "orchard", folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "loop": loop}))
    stock = twin.build(open_model(folder, trust_remote_code=True).config, 0, torch.bfloat16)
    tensors = {name: tensor.contiguous() for name, tensor in stock.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    out = compiled(folder, trusted=True)
    with pytest.raises(InputRefused):
        prove_model(Request(out))
    report = prove_model(Request(out, count=64, trust_remote_code=True))
    assert_clean(report)
    blocks = [row for layer in report.layers for row in layer.rows if row.agreement is not None]
    assert blocks
    layer = next(layer.index for layer in report.layers if any(row.kind == "experts" for row in layer.rows))
    found = prove_model(Request(damaged(out, layer, trusted=True), count=64, trust_remote_code=True))
    assert wrong_experts(found) == {1, 2}
