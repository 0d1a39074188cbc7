"""What cannot be compiled is refused by name, with exit code 2, and leaves nothing at OUT."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ktc
from ktc.cli import app as cli
from ktc.foundation import environment, host, measured_host, resources
from ktc.model import twin

RULES = resources.examples() / "deepseek-v2-lite-lora.ktr"  # it expects its matches


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded DeepSeek-V2 checkpoint, to be damaged."""
    folder = tmp_path / "model"
    shutil.copytree(twin.write("deepseek_v2", environment.cache_dir()), folder)
    return folder


@pytest.fixture
def refusal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, object]]:
    """Compiles, expects exit code 2 and nothing at OUT, and returns the first diagnostic."""

    def compile_and_refuse(
        model: object, rules: object = RULES, out: Path | None = None, code: int = 2
    ) -> dict[str, object]:
        out = out or tmp_path / "place" / "compiled_here"
        before = sorted(tmp_path.rglob("*"))
        assert cli.main(["compile", str(model), str(rules), "-o", str(out), "--json"]) == code
        printed = json.loads(capfd.readouterr().out)
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return printed["diagnostics"][0]

    return compile_and_refuse


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def shard_with(model: Path, ending: str) -> tuple[Path, str, dict[str, torch.Tensor]]:
    """The shard that holds a tensor whose name ends so, the tensor's name, and everything in the shard."""
    for path in shards(model):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith(ending):
                return path, name, tensors
    raise AssertionError(ending)


def test_a_model_that_is_no_folder(refusal: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    found = refusal(tmp_path / "nowhere")
    assert found["code"] == "I100"
    assert "nowhere" in str(found["message"])


def test_a_folder_without_a_config(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    (model / "config.json").unlink()
    assert refusal(model)["code"] == "I102"


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "no_such_model"}', '{"model_type": 7}', "\x00\x01"])
def test_a_config_that_is_none(refusal: Callable[..., dict[str, object]], model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert refusal(model)["code"] == "I102"


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0}, {"hidden_size": "abc"}, {"hidden_size": -5}, {"num_hidden_layers": 0},
        {"num_experts_per_tok": 99}, {"qk_rope_head_dim": 7}, {"hidden_act": "no_such_act"}, {"vocab_size": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_describes_no_model(
    refusal: Callable[..., dict[str, object]], model: Path, change: dict[str, object]
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = refusal(model)
    assert str(found["code"])[0] in "IM"
    assert ktc.check(RULES, model)[0].code == found["code"]


def test_a_config_nested_without_end(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    (model / "config.json").write_text("[" * 100_000)
    assert refusal(model)["code"] == "I102"


def test_experts_stored_in_two_dtypes(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    path, name, tensors = shard_with(model, "experts.3.up_proj.weight")
    tensors[name] = tensors[name].float()
    save_file(tensors, path, metadata={"format": "pt"})
    found = refusal(model)
    assert found["code"] == "M068"
    assert "bf16 and fp32" in str(found["message"])


def test_a_config_without_routed_experts(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    dense = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 128,
    }
    (model / "config.json").write_text(json.dumps(dense))
    found = refusal(model, "moe-lora")
    assert found["code"] == "I105"
    assert "llama" in str(found["message"])


def test_weights_missing_altogether(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    for path in [*shards(model), model / "model.safetensors.index.json"]:
        path.unlink()
    assert refusal(model)["code"] == "I106"


def test_a_truncated_shard(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    path = shards(model)[0]
    path.write_bytes(path.read_bytes()[:-100])
    assert path.name in str(refusal(model)["message"])


def test_a_header_that_claims_more_than_the_file_holds(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    path = shards(model)[0]
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    assert path.name in str(refusal(model)["message"])


def test_a_shard_that_is_not_there(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    path = shards(model)[-1]
    path.unlink()
    assert path.name in str(refusal(model)["message"])


@pytest.mark.parametrize("ending", ["experts.3.up_proj.weight", "self_attn.o_proj.weight"])
def test_a_shard_that_lacks_a_tensor(refusal: Callable[..., dict[str, object]], model: Path, ending: str) -> None:
    path, name, tensors = shard_with(model, ending)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    assert name in str(refusal(model)["message"])


@pytest.mark.parametrize("ending", ["experts.3.up_proj.weight", "self_attn.o_proj.weight"])
def test_a_tensor_of_the_wrong_shape(refusal: Callable[..., dict[str, object]], model: Path, ending: str) -> None:
    path, name, tensors = shard_with(model, ending)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    assert name in str(refusal(model)["message"])


def test_a_tensor_of_the_wrong_dtype(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    path, name, tensors = shard_with(model, "self_attn.o_proj.weight")
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, path, metadata={"format": "pt"})
    assert name in str(refusal(model)["message"])


def test_a_rule_with_a_syntax_error_is_located(
    refusal: Callable[..., dict[str, object]], model: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "broken.ktr"
    rules.write_text('import "std/moe.ktr"\nrule experts {\n  match moe.block\n  => cpu_moe(\n}\n')
    found = refusal(model, rules)
    assert str(found["file"]).endswith("broken.ktr")
    assert (found["line"], str(found["code"])[0]) == (5, "E")


def test_a_rule_that_matches_nothing_is_located(
    refusal: Callable[..., dict[str, object]], model: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "nothing.ktr"
    rules.write_text(
        'import "std/moe.ktr"\nimport "std/attention.ktr" as attn\n'
        "rule experts { match moe.block => cpu_moe() }\nrule gqa { match attn.gqa => keep(kernel) }\n"
    )
    found = refusal(model, rules)
    assert (found["code"], found["line"]) == ("M060", 4)


def test_rules_that_are_not_there(refusal: Callable[..., dict[str, object]], model: Path) -> None:
    assert refusal(model, "moe-lroa")["code"] == "E011"


def test_an_out_that_exists(refusal: Callable[..., dict[str, object]], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "taken"
    out.mkdir()
    assert refusal(model, out=out)["code"] == "I142"


@pytest.mark.parametrize("name", ["2fast", "with-dash", "class"])
def test_an_out_that_is_no_identifier(
    refusal: Callable[..., dict[str, object]], model: Path, tmp_path: Path, name: str
) -> None:
    assert refusal(model, out=tmp_path / name)["code"] == "I140"


def test_an_out_that_shadows_a_module(refusal: Callable[..., dict[str, object]], model: Path, tmp_path: Path) -> None:
    assert refusal(model, out=tmp_path / "json")["code"] == "I141"


def test_an_out_that_cannot_be_written_is_refused_before_the_long_work(
    refusal: Callable[..., dict[str, object]], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long_work(*_: object, **__: object) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("ktc.stages.capture.source.open_model", long_work)
    found = refusal(model, out=Path("/proc/compiled_here"), code=3)
    assert found["code"] == "I143"
    assert "`/proc`" in str(found["message"])


def test_a_disk_that_fills_up_while_out_is_written(
    refusal: Callable[..., dict[str, object]], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        if "compiled_here" in os.readlink(f"/proc/self/fd/{descriptor}"):  # the cache of kernels has another disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = refusal(model, code=3)
    assert found["code"] == "I145"
    assert "No space left" in str(found["message"])


def test_an_isa_that_this_host_lacks(
    refusal: Callable[..., dict[str, object]], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    here = host.detect()
    for module in (host, measured_host):
        monkeypatch.setattr(module, "detect", lambda probe_gpu=False: replace(here, isas=("scalar",)))
    rules = model.parent / "wants.ktr"
    rules.write_text('import "std/moe.ktr"\nrule experts { match moe.block => cpu_moe(isa = avx512_bf16) }\n')
    assert refusal(model, rules, code=3)["code"] == "M064"


def test_a_host_without_a_compiler(
    refusal: Callable[..., dict[str, object]], model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path.parent / "no_compiler_cache"))
    found = refusal(model, code=3)
    assert "g++" in str(found["hint"]) + str(found["message"])
