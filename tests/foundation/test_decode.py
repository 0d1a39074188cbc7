"""Reading JSON promises: nesting that no parser follows and bytes that are no text are refused, never a crash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ktc.diagnostics import InputRefused
from ktc.foundation.decode import Undecodable, decode, read_json
from ktc.model.checkpoint import open_index, read_sources
from ktc.model.checkpoint.header import HeaderRefused, read_header
from ktc.model.hf import remote_code
from ktc.model.loading.peft_glue import read_lora_config
from ktc.model.manifest.manifest import KernelRecord, read_manifest
from ktc.model.packed_store import packed_file, packed_store
from ktc.stages.capture import open_model

BAD = {"nested": b"[" * 200_000, "nested objects": b'{"a":' * 200_000, "no UTF-8": b'{"a": "\xff"}'}


def packed_header(path: Path) -> packed_file.Header:
    text = path.read_bytes()
    path.write_bytes(b"KTCPACK\n" + len(text).to_bytes(4, "little") + text + hashlib.sha256(text).digest())
    return packed_file.read_header(path)


def tensor_header(path: Path) -> object:
    text = path.read_bytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return read_header(path)


READERS: dict[str, tuple[str, type[Exception], Callable[[Path], object]]] = {
    "manifest": ("ktc.json", InputRefused, lambda path: read_manifest(path.parent)),
    "adapter": ("lora.json", InputRefused, lambda path: read_lora_config(path.parent)),
    "packed index": ("packed/packed.json", InputRefused, lambda path: packed_store.read_index(path.parents[1])),
    "packed header": ("a.packed", packed_file.Damaged, packed_header),
    "rows": ("weights.json", ValueError, lambda path: read_sources(path.read_bytes())),
    "config": ("config.json", InputRefused, lambda path: open_model(path.parent)),
    "trusted config": ("config.json", InputRefused, lambda path: open_model(path.parent, trust_remote_code=True)),
    "shards": ("model.safetensors.index.json", InputRefused, lambda path: open_index(path.parent)),
    "tensors": ("model.safetensors", HeaderRefused, tensor_header),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bad", BAD)
def test_no_text_that_is_no_json_crashes_a_reader(tmp_path: Path, reader: str, bad: str) -> None:
    file, refusal, read = READERS[reader]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(BAD[bad] if reader != "packed header" else BAD[bad][:60_000])
    with pytest.raises(refusal):
        read(path)


@pytest.mark.parametrize("depth", [30, 500, 900])
def test_a_free_value_is_no_deeper_than_can_be_followed(depth: int) -> None:
    spec = {"a": read_json("[" * depth + "]" * depth)}
    row = {"entry": "e", "spec": spec, "source": "s", "digest": "d", "build": "b"}
    if depth == 30:
        decode(row, KernelRecord)
        return
    with pytest.raises(Undecodable, match="nested too deeply"):
        decode(row, KernelRecord)


def test_a_config_that_cannot_be_read_names_no_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(BAD["nested"])
    assert remote_code.model_file(tmp_path) is None


def test_json_is_read_from_text_and_from_bytes() -> None:
    assert read_json('{"a": [1]}') == read_json(b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json("[" * 200_000)
