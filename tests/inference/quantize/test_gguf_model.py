"""GGUF files of models: ktc's reader, the gguf package and the original agree on every weight of every family."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_twins
import pytest
import torch
from adapter_twins import adapted, stock
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from ktc.adapters.base_model import read_base
from ktc.adapters.merge import merge
from ktc.cli.app import main
from ktc.diagnostics import InputRefused
from ktc.inference.quantize import gguf_rows
from ktc.inference.quantize.checkpoint import quantize
from ktc.inference.quantize.gguf_model import write_gguf_model
from ktc.inference.quantize.gguf_rows import q4_0_blocks
from ktc.inference.quantize.scheme import SCHEMES
from ktc.model import twin
from ktc.model.checkpoint.full_precision import FullPrecision
from ktc.model.checkpoint.gguf_architectures import ARCHITECTURES
from ktc.model.checkpoint.gguf_file_name import file_name, label_of, name_of_model
from ktc.model.checkpoint.index import open_index
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.packed_store.weight_store import fill
from ktc.stages.capture.model import build_on_meta
from ktc.stages.capture.weights import map_weights

pytestmark = pytest.mark.usefixtures("one_thread")
WHOLE = ("qwen3_vl_moe", "kimi_k25")  # with towers
FAMILIES = [kind for kind in dict.fromkeys(itertools.chain(*ARCHITECTURES.values())) if kind not in WHOLE]


def checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    config = twin.shrink(twin.default_config(family))
    aligned = {"moe_intermediate_size": 64, "intermediate_size": 96, "shared_expert_intermediate_size": 64, **sizes}
    if family == "qwen3_moe":
        aligned.setdefault("norm_topk_prob", True)
    vars(config).update({name: value for name, value in aligned.items() if hasattr(config, name)})
    twin.build(config, seed=5, dtype=dtype).save_pretrained(folder, max_shard_size="90KB")
    return folder


def code(call: Callable[[], Any]) -> str:
    with pytest.raises(InputRefused) as refusal:
        call()
    return refusal.value.diagnostics[0].code


def file_in(folder: Path) -> Path:
    (found,) = folder.glob("*.gguf")
    return found


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Every tensor as the `gguf` package dequantises it."""
    return {
        each.name: torch.from_numpy(gguf.quants.dequantize(each.data, each.tensor_type).copy())
        for each in gguf.GGUFReader(path).tensors
    }


def loaded(folder: Path) -> Any:
    """The model that ktc reads from the folder's file."""
    config = AutoConfig.from_pretrained(folder)
    index = open_index(folder)
    assert index.gguf is not None
    model = build_on_meta(config)
    fill(model, map_weights(model, index).sources, index, {})
    return model.eval()


def rounded(source: Path, int4: Path) -> Any:
    """The original with the weights that the INT4 checkpoint holds, which stock transformers keeps as codes."""
    config = json.loads((int4 / "config.json").read_text())["quantization_config"]
    weights = FullPrecision(open_index(int4), config)
    with TensorReader(int4) as reader:
        rows = weights.reader(reader)
        for path in source.glob("*.safetensors"):
            tensors = {name: rows.read(weights.index.tensors[name]) for name in load_file(path)}
            save_file(tensors, path, metadata={"format": "pt"})
    return stock(source, torch.bfloat16)


def assert_same(found: Any, expected: Any) -> None:
    values = found.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(values[name], tensor.to(values[name].dtype)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_holds_the_model(family: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", family)
    written = write_gguf_model(source, tmp_path / "out", "q8_0")
    original = stock(source, torch.float32)
    found = tensors_of(file_in(written.path))
    pieces = {each.name: each for each in gguf_twins.pieces(original, split_latent=True)}
    assert found.keys() == pieces.keys()
    kinds = {each.name: each.tensor_type for each in gguf.GGUFReader(file_in(written.path)).tensors}
    assert gguf.GGMLQuantizationType.Q8_0 in kinds.values()
    for name, piece in pieces.items():
        stored = gguf.quants.quantize(piece.view.reshape(piece.shape).numpy(), kinds[name])
        expected = torch.from_numpy(gguf.quants.dequantize(stored, kinds[name]))
        assert torch.equal(found[name], expected.view(found[name].shape)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_ktc_loads_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", family)
    written = write_gguf_model(source, tmp_path / "out", "bf16", shard_bytes=200_000)
    assert len(written.files) > 1
    model, original = loaded(written.path), stock(source, torch.bfloat16)
    assert_same(model, original)


def put(filled: Any, model: Any) -> None:
    """Copy what was read to a model that has its computed buffers too."""
    values = {name: each for name, each in filled.state_dict().items() if not each.is_meta}
    model.load_state_dict(values, strict=False)
    model.tie_weights()


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("coded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_text_part_of_a_model_with_towers(family: str, coded: bool, tmp_path: Path) -> None:
    config = twin.shrink(twin.default_config(family, whole=True))
    config.get_text_config().moe_intermediate_size = 64
    twin.build(config, seed=5, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    source = tmp_path / "model"
    if coded:
        source = quantize(source, tmp_path / "int4", SCHEMES["int4-channel"]).path
    written = write_gguf_model(source, tmp_path / "out", "bf16")
    assert any("towers" in note for note in written.notes)
    assert not any("visual" in name or name.startswith("v.") for name in tensors_of(file_in(written.path)))
    assert written.types.get("q4_0", 0) == (6 * coded)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    if coded:
        meta, index = read_base(source).model, open_index(source)
        fill(meta, map_weights(meta, index).sources, index, {})
        put(meta, whole)
    text: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(written.path), dtype=torch.float32).eval()
    put(loaded(written.path), text)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, expected = text(ids).logits, whole(input_ids=ids).logits
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_int4_becomes_q4_0_bit_for_bit(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", "qwen3_moe", moe_intermediate_size=96)
    int4 = quantize(source, tmp_path / "int4", SCHEMES["int4-g32"], "linears").path
    written = write_gguf_model(int4, tmp_path / "out", "bf16")
    assert written.types["q4_0"] > 6
    assert "quantization_config" not in json.loads((written.path / "config.json").read_text())
    assert "-Q4_0" in written.files[0]
    assert_same(loaded(written.path), rounded(source, int4))


def test_permuted_rows_of_int4_stay_codes(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", "mixtral")
    int4 = quantize(source, tmp_path / "int4", SCHEMES["int4-channel"], "linears").path
    written = write_gguf_model(int4, tmp_path / "out", "f16")
    assert_same(loaded(written.path), rounded(source, int4))


def test_a_scale_that_fp16_rounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert q4_0_blocks(torch.zeros(1, 32, dtype=torch.int8), torch.tensor([[2.0**-30]])) is None
    int4 = quantize(checkpoint(tmp_path / "model", "qwen3_moe"), tmp_path / "int4", SCHEMES["int4-g32"]).path
    monkeypatch.setattr(gguf_rows, "q4_0_blocks", lambda codes, scales: None)
    assert code(lambda: write_gguf_model(int4, tmp_path / "out")) == "Q511"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["int4", "model"]


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", "qwen3_moe", torch.float32)
    adapted(stock(source)).save_pretrained(str(tmp_path / "adapter"))
    merge(tmp_path / "adapter", tmp_path / "merged", source)
    line = ["export", str(tmp_path / "adapter"), "--gguf", "--merged", "--type", "f32", "-o", str(tmp_path / "out")]
    assert main(line) == 0
    assert_same(loaded(tmp_path / "out"), stock(tmp_path / "merged"))


def test_bad_input_is_refused_and_nothing_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "model", "qwen3_moe", norm_topk_prob=False)
    assert code(lambda: write_gguf_model(source, tmp_path / "out")) == "Q510"
    unknown = checkpoint(tmp_path / "unknown", "phimoe")
    assert code(lambda: write_gguf_model(unknown, tmp_path / "out")) == "A606"
    assert code(lambda: write_gguf_model(unknown, tmp_path / "model")) == "A606"
    one_file = ["export", str(source), "--gguf", "-o", str(tmp_path / "x.gguf"), "--split-size", "1"]
    assert main(one_file) == 2
    assert "Q512" in capfd.readouterr().err
    shard = next(iter(sorted(source.glob("model-*.safetensors"))))
    index = json.loads((source / "model.safetensors.index.json").read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != shard.name}
    (source / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": kept}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    assert code(lambda: write_gguf_model(source, tmp_path / "out")) == "Q510"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "unknown"]


# Tokenizers and names ------------------------------------------------------------------------------------------------
def test_the_tokenizer_is_in_the_file(tmp_path: Path) -> None:
    source = twin.write("qwen3_moe", tmp_path / "cache")
    out = tmp_path / "model.gguf"
    assert main(["export", str(source), "--gguf", "-o", str(out), "--json"]) == 0
    fields = gguf.GGUFReader(out).fields
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert len(fields["tokenizer.ggml.merges"].contents()) > 10
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert {kinds[number] for number in tokenizer.all_special_ids} == {3}


# The convention's own expression, of the parts that ktc writes.
CONVENTION = re.compile(
    r"([A-Za-z0-9\s]*(?:-(?:[A-Za-z\s][A-Za-z0-9\s]*|[0-9\s]*))*)-((?:\d+x)?(?:\d+\.)?\d+[A-Za-z])-(v\d+(?:\.\d+)*)-([\w_]+)\.gguf"
)


@pytest.mark.parametrize("folder", ["Qwen3-30B-A3B", "DeepSeek_V2.5", "7B tune!", "...", "3b"])
def test_names_that_are_written_follow_the_convention(folder: str) -> None:
    name = file_name(name_of_model(folder), label_of(1_300_000_000, 64, 0), encoding="q8_0")
    read = CONVENTION.fullmatch(name)
    assert read is not None
    assert read.groups() == (name_of_model(folder), "1.3B", "v1.0", "Q8_0")
