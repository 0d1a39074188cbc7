"""A packed store: what it holds, how it is read and mapped, and when it is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ktc
from ktc.diagnostics import InputRefused
from ktc.foundation.host import find_compiler
from ktc.model.packed_store import packed_file, packed_store, weight_store, weights_stage
from ktc.model.packing import pack
from ktc.stages.link import cached, link

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]
LAYERS = ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")


@pytest.fixture(scope="module")
def kernel(hand_made: ModuleType) -> Any:
    return hand_made.scalar_kernel()


@pytest.fixture
def out(checkpoint: Path, hand_made: ModuleType, kernel: Any, tmp_path: Path) -> Path:
    """A compiled model of a checkpoint of its own."""
    shutil.copytree(checkpoint, tmp_path / "model")
    return link(hand_made.package(tmp_path / "model", kernel), tmp_path / "packed_twin")


@pytest.fixture
def packed(out: Path) -> Path:
    ktc.pack(out)
    return out


def store(folder: Path) -> Path:
    return folder / "packed"


def file_of(folder: Path, layer: int = 0) -> Path:
    return store(folder) / packed_store.file_name(LAYERS[layer])


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return ktc.load(folder, **options)(torch.arange(3, 60)[None]).logits


def refused(code: str, call: Callable[[], object]) -> str:
    with pytest.raises(InputRefused) as error:
        call()
    assert [d.code for d in error.value.diagnostics] == [code]
    return error.value.diagnostics[0].hint


# What it holds, and how it is used


def test_every_way_of_loading_gives_the_same_model(out: Path) -> None:
    expected = logits(out)
    report = ktc.pack(out)
    assert (report.packed, report.kept) == (LAYERS, ())
    assert report.size == sum(ktc.load(out).get_submodule(fqn).packed_bytes for fqn in LAYERS)
    for options in ({}, {"map": True}):
        assert torch.equal(logits(out, **options), expected)
    reference = logits(out, reference=True)
    shutil.rmtree(store(out))
    assert torch.equal(reference, logits(out, reference=True)), "the reference never looks at the store"


def test_a_store_holds_one_file_per_layer_and_their_seal(packed: Path) -> None:
    names = [packed_store.file_name(fqn) for fqn in LAYERS]
    assert sorted(path.name for path in store(packed).iterdir()) == [*names, "packed.json"]
    index = packed_store.read_index(packed)
    assert [entry.fqn for entry in index.layers] == list(LAYERS)
    for entry in index.layers:
        header = packed_file.read_header(store(packed) / entry.file)
        assert header.packed_bytes % 64 == 0
        assert entry.size == (store(packed) / entry.file).stat().st_size == packed_file.DATA + header.packed_bytes
        assert entry.content == header.content
    assert (store(packed) / names[0]).stat().st_blocks * 512 < packed_file.DATA, "the hole takes no space"


def test_names_of_files_stay_in_the_folder() -> None:
    names = [packed_store.file_name(fqn) for fqn in ("a.b", "a/b", "../x", "..", "ä", "")]
    assert len(set(names)) == len(names)
    assert all("/" not in name and name not in (".", "..") for name in names)


def test_experts_come_from_the_store_and_not_from_the_checkpoint(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("an expert was packed")

    monkeypatch.setattr("ktc.model.experts.module.FusedMoe.load_expert", never)
    ktc.load(packed)
    ktc.load(packed, map=True)


def test_a_mapped_model_is_shared_and_cannot_be_written_to(packed: Path) -> None:
    model = ktc.load(packed, map=True)
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file_of(packed)) in line]
    assert [line.split()[1] for line in lines] == ["r--s"]
    experts = model.get_submodule(LAYERS[0])
    with pytest.raises(RuntimeError, match="mapped read-only"):
        experts.load_expert(0, "down", torch.zeros(experts.hidden, experts.intermediate))
    plain = ktc.load(packed)
    for part in ("gate", "up", "down"):
        assert torch.equal(experts.expert(3, part), plain.get_submodule(LAYERS[0]).expert(3, part))


def test_a_mapped_model_trains_and_leaves_the_checkpoint_alone(packed: Path) -> None:
    before = {path: path.read_bytes() for path in (packed.parent / "model").glob("*.safetensors")}
    model = ktc.load(packed, map=True)
    head = model.lm_head.weight.requires_grad_()
    ids = torch.arange(3, 40)[None]
    model(ids, labels=ids).loss.backward()
    assert head.grad is not None
    with torch.no_grad():
        head.sub_(head.grad)
    assert {path: path.read_bytes() for path in before} == before


def test_auto_model_maps_too(packed: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(packed, trust_remote_code=True, map=True, dtype="auto")
    assert torch.equal(model(torch.arange(3, 60)[None]).logits, logits(packed))


def test_progress_counts_every_byte_once(out: Path) -> None:
    def watched(call: Callable[..., object]) -> tuple[list[int], set[int]]:
        calls: list[tuple[int, int]] = []
        call(out, progress=lambda done, total: calls.append((done, total)))
        return [done for done, _ in calls], {total for _, total in calls}

    for call in (ktc.pack, ktc.load, ktc.verify):
        done, totals = watched(call)
        assert done == sorted(done)
        assert {done[-1]} == totals, call


# What is refused


def test_nothing_to_map_is_an_error_with_the_command_that_mends_it(out: Path, compiled: Path) -> None:
    assert refused("L443", lambda: ktc.load(out, map=True)) == f"make one: `ktc pack {out}`"
    refused("L443", lambda: ktc.load(compiled, map=True))
    refused("L443", lambda: ktc.load(out, map=True, reference=True))
    refused("L443", lambda: ktc.pack(compiled))


def edit(path: Path, at: int, value: bytes = b"\xff") -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(value)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((store(folder) / "packed.json").read_text())
    change(content)
    (store(folder) / "packed.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: edit(file_of(out), 0),
        lambda out: edit(file_of(out), 8, b"\xff\xff\xff\xff"),
        lambda out: edit(file_of(out), 40),
        lambda out: os.truncate(file_of(out), packed_file.DATA + 64),
        lambda out: os.truncate(file_of(out), 5),
        lambda out: file_of(out).unlink(),
        lambda out: shutil.copyfile(file_of(out, 1), file_of(out)),
        lambda out: edit_index(out, lambda index: index["layers"][0].update(content="0")),
        lambda out: edit_index(out, lambda index: index.update(seal="")),
        lambda out: edit_index(out, lambda index: index.update(schema=0)),
        lambda out: (store(out) / "packed.json").write_text("[1"),
    ],
)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_damaged_store_is_refused_however_it_is_loaded(
    packed: Path, damage: Callable[[Path], object], mapped: bool
) -> None:
    damage(packed)
    assert "ktc pack" in refused("L441", lambda: ktc.load(packed, map=mapped))
    assert {finding.state for finding in ktc.verify(packed)} & {"altered", "missing"}
    ktc.pack(packed)
    assert all(finding.state == "good" for finding in ktc.verify(packed, source=True))
    ktc.load(packed, map=True)


def test_a_layer_that_is_cut_short_is_altered_and_one_that_is_gone_is_missing(packed: Path) -> None:
    os.truncate(file_of(packed), packed_file.DATA + 64)
    file_of(packed, 1).unlink()
    found = {finding.found.split(":")[0]: finding.state for finding in ktc.verify(packed)}
    assert (found[file_of(packed).name], found[file_of(packed, 1).name]) == ("altered", "missing")


def test_a_folder_in_the_place_of_a_layer_is_to_be_moved_away(out: Path) -> None:
    file_of(out).mkdir(parents=True)
    for options in ({}, {"force": True}):
        hint = refused("L444", lambda options=options: ktc.pack(out, **options))
        assert hint.startswith(f"move `{file_of(out)}` away")


def test_what_cannot_be_read_is_said_of_the_checkpoint(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(weight_store, "fill", failing)
    refused("L405", lambda: ktc.pack(out))


def test_a_mapping_that_the_system_refuses_is_said_of_the_layer(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(packed_file, "map_read_only", failing)
    refused("L441", lambda: ktc.load(packed, map=True))


def other_kernel(out: Path) -> None:
    manifest = json.loads((out / "ktc.json").read_text())
    manifest["kernels"][0]["build"] = "0"
    (out / "ktc.json").write_text(json.dumps(manifest))


def other_checkpoint(out: Path) -> None:
    path = next(path for path in sorted((out.parent / "model").glob("*.safetensors")) if experts_in(path))
    tensors = load_file(path)
    tensors[experts_in(path)[0]] *= 2
    save_file(tensors, path, metadata={"format": "pt"})


def experts_in(path: Path) -> list[str]:
    return [name for name in load_file(path) if ".experts." in name]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(other_kernel, "another kernel"), (other_checkpoint, "has changed since")],
)
def test_a_stale_store_is_named_and_never_used(packed: Path, change: Callable[[Path], None], reason: str) -> None:
    before = logits(packed)
    change(packed)
    hint = refused("L442", lambda: ktc.load(packed, map=True))
    assert hint == f"renew it: `ktc pack {packed}`"
    with pytest.warns(UserWarning, match=f"{reason}.*ktc pack"):
        now = logits(packed)
    assert torch.equal(now, before) == (change is not other_checkpoint)
    states = {finding.name: finding.state for finding in ktc.verify(packed)}
    assert states["packed store"] == "stale"
    assert ktc.pack(packed).packed == LAYERS
    assert torch.equal(logits(packed, map=True), now)


def for_another_use(out: Path, call: dict[str, Any], change: Callable[[dict[str, Any]], object] = str) -> Path:
    """A compiled model of other rules, whose experts are called in another way."""
    other = shutil.copytree(out, out.parent / "other", ignore=shutil.ignore_patterns("packed"))
    manifest = json.loads((other / "ktc.json").read_text())
    manifest["rules"]["settings"] = {"rank": "9"}
    for step in manifest["rewrites"]:
        step["args"].update(call if step["module"] == "fused_moe" else {})
    change(manifest)
    (other / "ktc.json").write_text(json.dumps(manifest))
    return other


def test_models_for_two_uses_have_one_file_per_layer(packed: Path) -> None:
    other = for_another_use(packed, {"activations": "recompute"})
    assert cached.with_packed_store(other) == (packed,)
    assert cached.with_packed_store(packed) == ()
    report = ktc.pack(other, others=[packed])
    assert (report.packed, report.kept, report.linked) == ((), (), LAYERS)
    assert all(file_of(other, n).samefile(file_of(packed, n)) for n in range(2))
    expected = logits(packed)
    assert torch.equal(logits(other, map=True), expected)
    assert all(finding.state == "good" for finding in ktc.verify(other, source=True))
    assert ktc.pack(packed, force=True).packed == LAYERS
    shutil.rmtree(store(packed))
    assert torch.equal(logits(other, map=True), expected), "the other store keeps its files"


def test_layers_that_differ_or_are_not_sealed_are_packed(packed: Path) -> None:
    other = for_another_use(packed, {}, lambda m: m["kernels"][0].update(build="0"))
    assert ktc.pack(other, others=[packed]).packed == LAYERS
    shutil.rmtree(other)
    other = for_another_use(packed, {})
    (store(packed) / "packed.json").unlink()
    assert ktc.pack(other, others=[packed, packed.parent / "absent"]).packed == LAYERS


def test_values_of_a_linked_model_are_finite(packed: Path) -> None:
    other = for_another_use(packed, {})
    for path in (packed.parent / "model").glob("*.safetensors"):
        tensors, status = load_file(path), path.stat()
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][0] = float("nan")
            save_file(tensors, path, metadata={"format": "pt"})
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    refused("L407", lambda: ktc.pack(other, others=[packed]))


def test_a_file_that_cannot_be_linked_is_packed(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refusing)
    other = for_another_use(packed, {})
    assert pack.link(other, [packed]) is None
    assert not store(other).exists(), "nothing is packed unasked"
    assert ktc.pack(other, others=[packed]).packed == LAYERS


def test_a_store_is_linked_whole_or_not_at_all(packed: Path) -> None:
    other = for_another_use(packed, {"threads": 2, "numa": "none", "activations": "recompute"})
    elsewhere = shutil.copytree(packed, packed.parent / "elsewhere")
    manifest = json.loads((elsewhere / "ktc.json").read_text())
    manifest["model"]["folder"] += "_2"
    (elsewhere / "ktc.json").write_text(json.dumps(manifest))
    assert pack.link(other, [elsewhere]) is None, "its checkpoint is in another folder"
    file_of(packed, 1).rename(packed / "gone")
    assert pack.link(other, [packed]) is None
    assert not store(other).exists()
    (packed / "gone").rename(file_of(packed, 1))
    report = pack.link(other, [packed])
    assert report is not None
    assert report.linked == LAYERS
    assert torch.equal(logits(other, map=True), logits(packed))
    assert pack.link(other, [packed]) is None, "it has a store"


def test_a_link_to_a_link_is_one_to_the_file(packed: Path) -> None:
    other = for_another_use(packed, {})
    file_of(packed).rename(packed / "moved")
    file_of(packed).symlink_to(packed / "moved")
    assert ktc.pack(other, others=[packed]).linked == LAYERS
    assert not file_of(other).is_symlink()


def test_a_copied_checkpoint_is_told_from_the_original_only_by_its_times(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed.parent / "model", tmp_path / "moved")  # keeps times
    ktc.load(packed, weights=tmp_path / "moved", map=True)
    for path in (tmp_path / "moved").glob("*.safetensors"):
        os.utime(path)
    assert refused("L442", lambda: ktc.load(packed, weights=tmp_path / "moved", map=True))
    assert ktc.pack(packed, weights=tmp_path / "moved").packed == LAYERS
    ktc.load(packed, weights=tmp_path / "moved", map=True)


def test_values_that_are_not_finite_are_not_packed(out: Path) -> None:
    for name in (".experts.3.up_proj.weight", "model.norm.weight"):
        for path in (out.parent / "model").glob("*.safetensors"):
            tensors = load_file(path)
            for key in [key for key in tensors if key.endswith(name)]:
                tensors[key].view(-1)[-1] = float("inf")
            save_file(tensors, path, metadata={"format": "pt"})
        refused("L407", lambda: ktc.pack(out))
        assert not (store(out) / "packed.json").exists()


# What is verified


def test_verify_reads_every_byte(packed: Path) -> None:
    assert all(finding.state == "good" for finding in ktc.verify(packed, source=True))
    edit(file_of(packed, 1), -100)
    logits(packed)  # a load looks at headers and sizes alone
    bad = [finding for finding in ktc.verify(packed) if finding.state != "good"]
    assert [(finding.name, finding.state) for finding in bad] == [("packed layer", "altered")]
    assert f"rm {file_of(packed, 1)} && ktc pack {packed}" in bad[0].remedy
    assert ktc.pack(packed, force=True).packed == LAYERS
    assert all(finding.state == "good" for finding in ktc.verify(packed))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sealed files", lambda out: (out / "config.json").write_text("{}")),
        ("rules", lambda out: (out / "rules" / "moe-lora.ktr").write_text("rule other {}\n")),
        ("kernel source", lambda out: next((out / "kernels").glob("FusedMoe*.cpp")).write_text("")),
        ("library", lambda out: edit(next(out.glob("lib*.so")), -1)),
        ("checkpoint", lambda out: (out.parent / "model" / "config.json").write_text("{}")),
    ],
)
def test_verify_names_what_was_altered(out: Path, name: str, change: Callable[[Path], object]) -> None:
    assert all(finding.state == "good" for finding in ktc.verify(out))
    change(out)
    bad = [finding for finding in ktc.verify(out) if finding.state != "good"]
    assert [finding.name for finding in bad] == [name]
    assert "ktc compile" in bad[0].remedy


MEASURE = """
import re, sys, threading
from pathlib import Path
import ktc

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while not done.wait(0.001):
        samples.append(anonymous())

getattr(ktc, sys.argv[1])(sys.argv[2])  # what the first call of a process imports and keeps is not counted
done, samples = threading.Event(), [anonymous()]
watcher = threading.Thread(target=watch)
watcher.start()
options = {"map": True} if sys.argv[4:] else {}
kept = getattr(ktc, sys.argv[1])(sys.argv[3], progress=lambda *_: samples.append(anonymous()), **options)
done.set()
watcher.join()
print(samples[0], max(samples))
"""


def growth(*arguments: object) -> int:
    """Bytes by which the anonymous memory of a process grows at most in a second call."""
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = map(int, re.findall(r"\d+", done.stdout))
    return peak - before


@pytest.mark.slow
def test_memory_holds_the_packed_model_and_a_piece_at_most(
    hand_made: ModuleType, kernel: Any, packed: Path, tmp_path: Path
) -> None:
    big = link(hand_made.package(hand_made.zeros(tmp_path / "big"), kernel), tmp_path / "big_out")
    assert growth("pack", packed, big) < (60 << 20), "one of three layers of 49 MiB"
    size = sum(entry.size - packed_file.DATA for entry in packed_store.read_index(big).layers)
    assert size > 140 << 20
    assert size < growth("load", packed, big) < size + (16 << 20)
    assert growth("load", packed, big, "map") < 8 << 20


@pytest.mark.slow
def test_a_mapped_start_is_at_once(
    hand_made: ModuleType, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = link(hand_made.package(hand_made.zeros(tmp_path / "big"), kernel), tmp_path / "big_out")
    inner, seconds = weights_stage.fill_weights, list[float]()

    def timed(*arguments: Any, **options: Any) -> None:
        begun = time.perf_counter()
        inner(*arguments, **options)
        seconds.append(time.perf_counter() - begun)

    monkeypatch.setattr(weights_stage, "fill_weights", timed)
    ktc.load(big)
    ktc.pack(big)
    ktc.load(big, map=True)
    ktc.load(big, map=True)
    assert seconds[2] * 20 < seconds[0], "20 times is the promise, some hundred times is usual"
