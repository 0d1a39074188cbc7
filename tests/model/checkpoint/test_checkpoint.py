"""The checkpoint index: what headers say is checked against the files, and every problem is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ktc.diagnostics import InputRefused
from ktc.model.checkpoint import WeightSource, has_weights, open_index, read_sources, write_sources
from ktc.model.checkpoint.reader import TensorReader

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.randn(4, 2, 3).to(torch.bfloat16),
    "c.count": torch.tensor(7),
    "d.empty": torch.zeros(0, 5),
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = sorted(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, tmp_path / file)
    write_index(tmp_path, {name: file for file, held in shards.items() for name in held})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def refusal(folder: Path) -> str:
    with pytest.raises(InputRefused) as refused:
        open_index(folder)
    return "\n".join(f"{d.code} {d.message}" for d in refused.value.diagnostics)


def test_the_index_knows_names_shapes_dtypes_and_files(sharded: Path) -> None:
    index = open_index(sharded)
    assert set(index.tensors) == set(TENSORS)
    entry = index.tensors["b.weight"]
    assert (entry.dtype, entry.shape, entry.file) == ("bf16", (4, 2, 3), "model-00001-of-00002.safetensors")
    assert index.bytes == 12 * 4 + 24 * 2 + 8
    assert len(index.files) == 2


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert set(open_index(tmp_path).tensors) == set(TENSORS)


def test_the_reader_gives_whole_tensors_and_runs_of_rows(sharded: Path) -> None:
    index = open_index(sharded)
    with TensorReader(sharded) as reader:
        for name, tensor in TENSORS.items():
            assert torch.equal(reader.read(index.tensors[name]), tensor)
        rows = reader.read(index.tensors["b.weight"], slice(1, 3))
        assert torch.equal(rows, TENSORS["b.weight"][1:3])


def test_a_shard_cut_after_the_index_was_opened_is_named(sharded: Path) -> None:
    index = open_index(sharded)
    entry = index.tensors["b.weight"]
    with (sharded / entry.file).open("r+b") as file:
        file.truncate(entry.end - 1)
    with TensorReader(sharded) as reader, pytest.raises(InputRefused, match=r"b\.weight.*truncated"):
        reader.read(entry)


def test_a_truncated_shard_is_refused_with_the_tensor_that_is_cut(sharded: Path) -> None:
    path = sharded / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "I112 `model-00001-of-00002.safetensors` is truncated: tensor `b.weight`" in refusal(sharded)


def test_all_problems_are_reported_together(sharded: Path) -> None:
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"\x01")
    (sharded / "model-00002-of-00002.safetensors").unlink()
    text = refusal(sharded)
    assert "has 1 bytes" in text
    assert "I114 shard `model-00002-of-00002.safetensors` is missing" in text


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    save_file({"a.weight": TENSORS["a.weight"]}, sharded / "model-00001-of-00002.safetensors")
    assert "I115 shard `model-00001-of-00002.safetensors` lacks tensor `b.weight`" in refusal(sharded)


@pytest.mark.parametrize(
    "file",
    [
        "../other.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "model.bin",
        "..\\x.safetensors",
        7,
        ".x.safetensors",
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, file: object) -> None:
    write_index(tmp_path, {"a.weight": file})
    assert refusal(tmp_path).startswith("I113")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert refusal(tmp_path).startswith("I113")


def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert has_weights(tmp_path)
    with pytest.raises(InputRefused) as refused:
        open_index(tmp_path)
    assert "pickled" in refused.value.diagnostics[0].message
    assert "safetensors" in refused.value.diagnostics[0].hint


def test_a_folder_with_a_config_alone_has_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not has_weights(tmp_path)
    assert "I111" in refusal(tmp_path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"x": entry(data_offsets=[0, 4])}, b"\0" * 4, "needs 8 bytes"),
        ({"x": entry(data_offsets=[8, 0])}, b"\0" * 8, "not a range"),
        ({"x": entry(shape=[-2])}, b"\0" * 8, "list of integers"),
        ({"x": entry(shape=[True, 2])}, b"\0" * 8, "list of integers"),
        ({"x": entry(shape=[1 << 70])}, b"\0" * 8, "list of integers"),
        ({"x": entry(dtype="F4")}, b"\0" * 8, "dtype `F4`"),
        ({"x": entry(shape="2")}, b"\0" * 8, "list of integers"),
        ({"x": 3}, b"", "expected an object"),
        ({"x": entry(), "y": entry(data_offsets=[4, 12])}, b"\0" * 12, "overlaps"),
        ({"x": entry(), "y": entry(data_offsets=[12, 20])}, b"\0" * 20, "hole"),
        ({"x": entry()}, b"\0" * 9, "1 bytes longer"),
        ({"x": entry(data_offsets=[1 << 40, (1 << 40) + 8])}, b"\0" * 8, "truncated"),
        ([1], b"", "not a JSON object"),
        (b"\xff{", b"", "not JSON"),
        (b'{"x": 1, "x": 2}', b"", "appears twice"),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, header: object, data: bytes, reason: str
) -> None:
    write_raw(tmp_path / "model.safetensors", header, data)
    text = refusal(tmp_path)
    assert text.startswith("I112")
    assert reason in text


@pytest.mark.parametrize("length", [100_000_001, 1 << 63, 500])
def test_a_header_length_beyond_the_file_or_the_limit_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    assert "header" in refusal(tmp_path)


def test_weight_sources_survive_their_file() -> None:
    sources = (
        WeightSource("m.experts.down_proj", 3, "down", "m.experts.3.w2", "model.safetensors", "bf16", (4, 2)),
        WeightSource(
            "m.experts.gate_up_proj", None, "gate_up", "m.gu", "model.safetensors", "bf16", (8, 4, 2), "per_expert"
        ),
    )
    assert read_sources(write_sources(sources)) == sources


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../x"},
        {"transform": "run"},
        {"dtype": "q9"},
        {"shape": None},
        {"extra": 1},
        {"shape": [1 << 70]},
        {"shape": [1 << 40, 1 << 40]},
        {"expert": 10**30, "part": "up"},
        {"expert": -1, "part": "up"},
    ],
)
def test_a_weight_source_that_is_none_is_refused(change: dict[str, Any]) -> None:
    rows = json.loads(write_sources((WeightSource("t", None, None, "k", "f.safetensors", "bf16", (2,)),)))
    rows[0].update(change)
    with pytest.raises(ValueError):
        read_sources(json.dumps(rows))


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b[:8] + b"[" + b[9:], lambda b: b + b"\0"])
def test_no_damage_to_a_real_file_goes_unnoticed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(damage(path.read_bytes()))
    assert "I112" in refusal(tmp_path)
