"""GGUF files that lie: every count, length, type, shape and offset is checked, and told with its place."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quants

from ktc.diagnostics import InputRefused
from ktc.model.checkpoint import CheckpointIndex, open_index
from ktc.model.checkpoint.gguf_types import BLOCK_TYPES, TYPE_NAMES

U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def setting(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = setting(b"general.architecture", STRING, text(b"olmoe"))


def tensor(name: bytes = b"a", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw(
    settings: tuple[bytes, ...] = (ARCHITECTURE,),
    tensors: tuple[bytes, ...] = (tensor(),),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 4096,
) -> bytes:
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(settings))))
    body = head + b"".join(settings) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


def opened(folder: Path, content: bytes, name: str = "model.gguf") -> CheckpointIndex:
    folder.joinpath(name).write_bytes(content)
    return open_index(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(InputRefused) as refused:
        open_index(folder)
    return "\n".join(f"{d.code} {d.message}" for d in refused.value.diagnostics)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    content = raw(tensors=(tensor(b"b", (64, 3), 8, 128), tensor(b"a"), tensor(b"c", (32, 2, 2), 39, 352)))
    index = opened(tmp_path, content)
    assert list(index.tensors) == ["a", "b", "c"]
    entry = index.tensors["b"]
    assert (entry.dtype, entry.shape, entry.end - entry.begin) == ("q8_0", (3, 64), 204)
    assert index.tensors["c"].shape == (2, 2, 32)
    assert index.gguf is not None
    assert index.gguf["general.architecture"] == "olmoe"


def test_what_is_no_file_is_refused_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    assert "I114 `model.gguf` cannot be read: it is a pipe, not a regular file" in refusal(tmp_path)
    tmp_path.joinpath("model.gguf").unlink()
    tmp_path.joinpath("model.gguf").mkdir()
    assert "I114 `model.gguf` cannot be read: it is a folder" in refusal(tmp_path)


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file"),
    "magic": (raw(magic=b"GGML"), "is not a GGUF file"),
    "version 1": (raw(version=1), "of version 1; ktc reads 2 and 3"),
    "big end first": (raw(version=3 << 24), "is a big-endian GGUF file"),
    "many tensors": (raw(counts=(1 << 60, 1)), f"claims {1 << 60} tensors"),
    "many settings": (raw(counts=(1, 1 << 63)), f"claims {1 << 63} settings"),
    "one more setting": (raw(counts=(1, 2)), "I112"),
    "long key": (raw((struct.pack("<Q", 1 << 50),)), f"a setting's name of {1 << 50} bytes"),
    "empty key": (raw((setting(b"", U32, b"\1\0\0\0"),)), "no readable name"),
    "key with an escape": (raw((setting(b"a\x1b", U32, b"\1\0\0\0"),)), "no readable name"),
    "two of a key": (raw((ARCHITECTURE, ARCHITECTURE)), "`general.architecture` twice"),
    "unknown value": (raw((setting(b"a", 13, b""),)), "unknown type 13"),
    "bad bool": (raw((setting(b"a", 7, b"\2"),)), "a boolean value of 2"),
    "no UTF-8": (raw((setting(b"a", STRING, text(b"\xff")),)), "not UTF-8"),
    "long text": (raw((setting(b"a", STRING, struct.pack("<Q", 1 << 40)),)), f"of {1 << 40} bytes"),
    "long array": (raw((setting(b"a", ARRAY, struct.pack("<IQ", 0, 1 << 40)),)), "truncated"),
    "long array of texts": (raw((setting(b"a", ARRAY, struct.pack("<IQ", 8, 1 << 40)),)), f"claims {1 << 40} texts"),
    "array of arrays": (raw((setting(b"a", ARRAY, struct.pack("<IQ", 9, 1)),)), "array of unknown type 9"),
    "no architecture": (raw(()), "names no architecture"),
    "architecture of a number": (raw((setting(b"general.architecture", U32, b"\1\0\0\0"),)), "names no architecture"),
    "architecture of a path": (
        raw((setting(b"general.architecture", STRING, text(b"../olmoe")),)), "names no architecture"
    ),
    "an adapter": (raw((ARCHITECTURE, setting(b"general.type", STRING, text(b"adapter")))), "has the type `adapter`"),
    "alignment 0": (raw((setting(b"general.alignment", U32, b"\0\0\0\0"),)), "an alignment of 0"),
    "alignment 24": (raw((setting(b"general.alignment", U32, b"\x18\0\0\0"),)), "an alignment of 24"),
    "alignment of 8 bytes": (raw((setting(b"general.alignment", 10, struct.pack("<Q", 32)),)), "an alignment of 32"),
    "old blocks": (raw((setting(b"general.quantization_version", U32, b"\1\0\0\0"),)), "by version 1"),
    "long name": (raw(tensors=(tensor(b"x" * 64),)), "a tensor's name of 64 bytes"),
    "empty name": (raw(tensors=(tensor(b""),)), "no readable name"),
    "bad name": (raw(tensors=(tensor(b"\xfe\xff"),)), "not UTF-8"),
    "two of a name": (raw(tensors=(tensor(), tensor(offset=128))), "tensor `a` twice"),
    "no dimension": (raw(tensors=(tensor(dims=()),)), "0 dimensions"),
    "five dimensions": (raw(tensors=(tensor(dims=(1, 1, 1, 1, 1)),)), "5 dimensions"),
    "a size of 0": (raw(tensors=(tensor(dims=(32, 0)),)), "the sizes [32, 0]"),
    "sizes that wrap": (raw(tensors=(tensor(dims=(1 << 32, 1 << 32)),)), "which no tensor of f32 has"),
    "half a block": (raw(tensors=(tensor(dims=(48,), kind=8),)), "in blocks of 32"),
    "unknown type": (raw(tensors=(tensor(kind=4),)), "unknown type 4"),
    "askew": (raw(tensors=(tensor(offset=8),)), "not a multiple of the alignment"),
    "offset that wraps": (raw(tensors=(tensor(offset=(1 << 64) - 32),)), "leaves a hole"),
    "overlap": (raw(tensors=(tensor(), tensor(b"b", offset=96))), "overlaps the tensor before it"),
    "a hole": (raw(tensors=(tensor(), tensor(b"b", offset=160))), "leaves a hole"),
    "beyond the file": (raw(tensors=(tensor(dims=(2048,)),)), "is truncated: tensor `a` ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_its_place(tmp_path: Path, lie: str) -> None:
    content, expected = LIES[lie]
    (tmp_path / "model.gguf").write_bytes(content)
    found = refusal(tmp_path)
    assert expected in found
    assert "`model.gguf`" in found


def written(path: Path, **split: Any) -> bytes:
    """A small file by the package's own writer, with settings of all kinds."""
    writer = GGUFWriter(path, "olmoe", **split)
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bb", "ccc"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.chat_template", "x" * 1100)
    for name in ("a.weight", "b.weight", "c.weight"):
        writer.add_tensor(name, quants.quantize(np.ones((4, 64), np.float32), Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes() if path.is_file() else b""


def test_a_broken_file_is_refused_and_nothing_else_happens(tmp_path: Path) -> None:
    """Cut at every place and with any bit flipped: the file is read, or refused with a diagnostic of ours."""
    good = written(tmp_path / "model.gguf")
    assert len(open_index(tmp_path).tensors) == 3
    padding, header = 16, len(good) - 3 * 288
    generator = random.Random(0)
    refused = 0
    cuts = range(0, len(good) - padding, 5)
    for place in cuts:
        refused += not _opens(tmp_path, good[:place])
    assert refused == len(cuts)
    for _ in range(600):
        broken = bytearray(good)
        for _ in range(generator.choice((1, 1, 3))):
            broken[generator.randrange(header)] ^= 1 << generator.randrange(8)
        refused += not _opens(tmp_path, bytes(broken))
    assert refused > len(cuts) + 100


def _opens(folder: Path, content: bytes) -> bool:
    refused, index = "", None
    try:
        index = opened(folder, content)
    except InputRefused as error:
        refused = " ".join(diagnostic.code for diagnostic in error.diagnostics)
    assert refused in ("", "I112", "I120")
    entries = index.tensors.values() if index is not None else ()
    assert all(0 < entry.begin < entry.end <= len(content) for entry in entries)
    return index is not None


# Several files


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    written(tmp_path / "model.gguf", split_max_tensors=1)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    return tmp_path


def test_shards_make_one_index(shards: Path) -> None:
    index = open_index(shards)
    assert list(index.tensors) == ["a.weight", "b.weight", "c.weight"]
    assert index.files == tuple(f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3))


def duplicate(folder: Path) -> None:
    second = (folder / "model-00002-of-00003.gguf").read_bytes().replace(b"b.weight", b"a.weight")
    (folder / "model-00002-of-00003.gguf").write_bytes(second)


def swap(folder: Path) -> None:
    one, two = (folder / f"model-0000{number}-of-00003.gguf" for number in (2, 3))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def lose(folder: Path) -> None:
    (folder / "model-00002-of-00003.gguf").unlink()


def add(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(b"GGUF")

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lose, "I114 1 of 3 shards are missing"),
        (add("other.gguf"), "I120 `"),
        (add("model-00004-of-00003.gguf"), "a number beyond the 3 shards"),
        (add("model-00002-of-00003.gguf"), "I112 `model-00002-of-00003.gguf`"),
        (duplicate, "I120 `model-00002-of-00003.gguf` has tensor `a.weight`, which is in `model-00001"),
        (swap, "has `split.no` = 2, expected 1"),
    ],
)
def test_shards_that_are_no_set_are_refused(shards: Path, change: Callable[[Path], object], expected: str) -> None:
    change(shards)
    assert expected in refusal(shards)


def test_one_shard_alone_is_refused_whatever_its_name(shards: Path) -> None:
    first = (shards / "model-00001-of-00003.gguf").rename(shards / "model.gguf")
    for path in shards.glob("*-of-*"):
        path.unlink()
    assert f"`{first.name}` has `split.count` = 3, expected 1" in refusal(shards)


def test_two_models_in_one_folder_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("olmoe-Q4_K_M.gguf", "olmoe-Q8_0.gguf"):
        (tmp_path / name).write_bytes(raw())
    assert "I120" in refusal(tmp_path)
    assert "`olmoe-Q4_K_M.gguf`, `olmoe-Q8_0.gguf`" in refusal(tmp_path)


def test_the_types_are_those_of_ggml() -> None:
    from gguf import GGML_QUANT_SIZES

    # ktc's own `nvfp4` has blocks of 32 with the scale of their matrix.
    names = {number: name.removeprefix("ggml_") for number, name in TYPE_NAMES.items()}
    assert {kind.value: kind.name.lower() for kind in Type if kind.value in TYPE_NAMES} == names
    of_blocks = {name.removeprefix("ggml_"): block for name, block in BLOCK_TYPES.items()}
    for kind, (weights, size) in GGML_QUANT_SIZES.items():
        if weights > 1:
            assert (of_blocks[kind.name.lower()].weights, of_blocks[kind.name.lower()].bytes) == (weights, size)
