"""`ktc quantize` writes what stock transformers loads bit for bit, names all that it left, and resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

from ktc.cli.app import main
from ktc.diagnostics import InputRefused
from ktc.inference.quantize import shards
from ktc.inference.quantize.checkpoint import quantize
from ktc.inference.quantize.scheme import SCHEMES
from ktc.inference.quantize.selection import Modules
from ktc.model import twin
from ktc.model.checkpoint import reader
from ktc.model.checkpoint.index import open_index
from ktc.model.checkpoint.int4 import fake_quantised
from ktc.model.checkpoint.quantised import stored_weights

pytestmark = pytest.mark.usefixtures("one_thread")
G32 = SCHEMES["int4-g32"]


def checkpoint(folder: Path, family: str = "qwen3_moe", shard: str = "60KB", **sizes: int) -> Path:
    """A twin in several files whose rows are multiples of 32 columns."""
    config = twin.shrink(twin.default_config(family))
    wanted = {"hidden_size": 64, "moe_intermediate_size": 96, **sizes}
    vars(config).update({name: size for name, size in wanted.items() if hasattr(config, name)})
    twin.build(config, seed=5, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    return folder


def loaded(folder: Path, **settings: Any) -> PreTrainedModel:
    stock: Any = AutoModelForCausalLM
    return cast("PreTrainedModel", stock.from_pretrained(folder, dtype=torch.bfloat16, **settings).eval())


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def code(call: Callable[[], Any]) -> str:
    with pytest.raises(InputRefused) as refusal:
        call()
    return refusal.value.diagnostics[0].code


@pytest.mark.parametrize(
    ("family", "scheme", "modules"),
    [
        ("qwen3_moe", "int4-g32", "experts"), ("qwen3_moe", "int4-channel", "experts"),
        ("deepseek_v3", "int4-channel", "linears"), ("mixtral", "int4-g64", "experts"),
        ("olmoe", "int4-g32", "linears"), ("qwen2_moe", "int4-g64", "linears"),
    ],
)  # fmt: skip
def test_stock_transformers_loads_the_weights_that_were_trained(
    family: str, scheme: str, modules: Modules, tmp_path: Path
) -> None:
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 128, "shared_expert_intermediate_size": 64}
    source = checkpoint(tmp_path / "model", family, **sizes)
    done = quantize(source, tmp_path / "int4", SCHEMES[scheme], modules)
    original, found = stored(source), stored(done.path)
    quantised = {name for name in original if f"{name}_packed" in found}
    assert len(quantised) == done.quantised
    assert any(".self_attn." in name for name in quantised) == (modules == "linears")
    assert not any("gate.weight" in name for name in quantised)  # of routers and of shared experts
    assert all(torch.equal(each, found[name]) for name, each in original.items() if name not in quantised)
    for path in sorted(source.glob("*.safetensors")):
        dense = {
            name: (fake_quantised(each, SCHEMES[scheme].group) if name in quantised else each).contiguous()
            for name, each in load_file(path).items()
        }
        save_file(dense, path, metadata={"format": "pt"})
    trained = loaded(source)
    weights = loaded(done.path, quantization_config=CompressedTensorsConfig(dequantize=True)).state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in trained.state_dict().items())
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, loaded(done.path)(ids).logits)


def test_the_list_of_other_modules_is_complete(tmp_path: Path) -> None:
    done = quantize(checkpoint(tmp_path / "model"), tmp_path / "int4", G32)
    ignored: list[str] = json.loads((done.path / "config.json").read_text())["quantization_config"]["ignore"]

    def is_ignored(module: str) -> bool:
        return any(re.match(each[3:], module) if each.startswith("re:") else each == module for each in ignored)

    tensors = stored(done.path)
    packed = {name.removesuffix(".weight_packed") for name in tensors if name.endswith("_packed")}
    assert packed
    assert not any(is_ignored(module) for module in packed)
    plain = (
        name.removesuffix(".weight") for name, each in tensors.items() if name.endswith(".weight") and each.dim() > 1
    )
    assert all(is_ignored(module) for module in plain)
    assert len(ignored) < 12


def test_ktc_reads_what_it_writes(tmp_path: Path) -> None:
    done = quantize(checkpoint(tmp_path / "model"), tmp_path / "int4", G32)
    config = json.loads((done.path / "config.json").read_text())["quantization_config"]
    weights, problems = stored_weights(open_index(done.path).tensors, config)
    assert not problems
    assert sum(weight.quantised is not None for weight in weights) == done.quantised


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "model")
    whole = quantize(source, tmp_path / "whole", G32)
    write, written = shards.write_shard, list[Path]()

    def stopping(*given: Any) -> shards.Rounding:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(given[4])
        return write(*given)

    monkeypatch.setattr("ktc.inference.quantize.checkpoint.write_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "int4", G32)
    assert not (tmp_path / "int4").exists()
    monkeypatch.setattr("ktc.inference.quantize.checkpoint.write_shard", write)
    assert quantize(source, tmp_path / "int4", G32).resumed_files == 2
    for path in sorted(whole.path.iterdir()):
        assert (tmp_path / "int4" / path.name).read_bytes() == path.read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["int4", "model", "whole"]


def test_files_of_another_scheme_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "model")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ktc.inference.quantize.checkpoint.copy_others", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "int4", G32)
    monkeypatch.undo()
    assert quantize(source, tmp_path / "int4", SCHEMES["int4-channel"]).resumed_files == 0


def test_memory_is_a_band_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "model")
    whole = quantize(source, tmp_path / "whole", G32)
    monkeypatch.setattr(reader, "_BAND", 256)
    bands = quantize(source, tmp_path / "bands", G32)
    found, expected = stored(bands.path), stored(whole.path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_bad_input_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", shard="5GB")
    with pytest.raises(InputRefused, match=r"64 columns of `model\.layers\.\*\.mlp\.experts\.\*\.gate_proj") as refusal:
        quantize(source, tmp_path / "out", SCHEMES["int4-g128"])
    assert [each.code for each in refusal.value.diagnostics] == ["Q503"]
    done = quantize(source, tmp_path / "int4", G32)
    assert code(lambda: quantize(done.path, tmp_path / "out", G32)) == "Q501"
    assert code(lambda: quantize(source, done.path, G32)) == "A609"
    dense = checkpoint(tmp_path / "dense", "llama", intermediate_size=96)
    assert code(lambda: quantize(dense, tmp_path / "out", G32)) == "Q502"
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name)
    tensors[name][0, 3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert code(lambda: quantize(source, tmp_path / "out", G32)) == "Q504"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dense", "int4", "model"]


def test_dense_models_take_all_linear_layers(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "dense", "llama", intermediate_size=96)
    done = quantize(source, tmp_path / "int4", G32, "linears")
    model = loaded(done.path)
    linears = sum(isinstance(module, nn.Linear) for module in loaded(source).modules())
    assert done.quantised == linears - 1  # the head
    assert model.get_output_embeddings() is not None


def test_the_command_says_what_it_wrote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "model")
    assert main(["quantize", str(source), "-o", str(tmp_path / "int4"), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["quantised"] > 0
    assert result["bytes_after"] < result["bytes_before"]
