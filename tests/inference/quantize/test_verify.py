"""`ktc verify` of converted folders: an altered file, a missing one, and an original that has changed are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_twins import adapted, stock

from ktc.adapters.conversion import RECORD
from ktc.cli.app import main
from ktc.model import twin

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, str]:
    config = twin.shrink(twin.default_config("qwen3_moe"))
    vars(config).update({"hidden_size": 64, "moe_intermediate_size": 96, "norm_topk_prob": True})
    base = tmp_path / "model"
    twin.build(config, seed=5, dtype=torch.bfloat16).save_pretrained(base, max_shard_size="120KB")
    adapted(stock(base, torch.bfloat16)).save_pretrained(str(tmp_path / "adapter"))
    return str(base), str(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["quantize", "merge", "merge --int4", "gguf", "gguf --merged"])
def test_a_conversion_is_verified(
    saved: tuple[str, str], tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    base, adapter = saved
    out = tmp_path / "out"
    lines: dict[str, list[str]] = {
        "quantize": ["quantize", base],
        "merge": ["merge", base, adapter],
        "merge --int4": ["merge", base, adapter, "--int4"],
        "gguf": ["export", base, "--gguf", "--type", "q8_0"],
        "gguf --merged": ["export", adapter, "--gguf", "--merged"],
    }
    assert main([*lines[kind], "-o", str(out)]) == 0
    assert states(out, capfd, "--source") == {("weights", "good"), ("converted again", "good")}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "adapter", "out"}
    file = max((*out.glob("*.safetensors"), *out.glob("*.gguf")))
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    assert ("weights", "altered") in states(out, capfd)
    file.unlink()
    assert ("weights", "missing") in states(out, capfd)
    original = max(Path(base).glob("*.safetensors"))
    content = bytearray(original.read_bytes())
    content[-8] ^= 1
    original.write_bytes(content)
    if kind != "quantize":  # the last tensor is not of an expert
        assert ("converted again", "altered") in states(out, capfd, "--source")


def states(out: Path, capfd: pytest.CaptureFixture[str], *options: str) -> set[tuple[str, str]]:
    capfd.readouterr()
    code = main(["verify", str(out), "--json", *options])
    found: Any = json.loads(capfd.readouterr().out)["findings"]
    assert code == (0 if all(each["state"] == "good" for each in found) else 1)
    return {(each["name"], each["state"]) for each in found}


def test_a_broken_record_is_refused(saved: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, _ = saved
    assert main(["quantize", base, "-o", str(tmp_path / "out")]) == 0
    record = tmp_path / "out" / RECORD
    whole = json.loads(record.read_text())
    for content in (record.read_text()[:40], "[]", json.dumps({**whole, "files": {"../model/config.json": ""}})):
        record.write_text(content)
        assert main(["verify", str(tmp_path / "out")]) == 2
        assert "Q513" in capfd.readouterr().err
