"""The cache of compiled models: one folder for exactly one compilation, which nobody else may write to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from families import CPU

from ktc.diagnostics import InputRefused
from ktc.foundation import resources
from ktc.language import dsl
from ktc.stages.capture import open_model
from ktc.stages.link.cached import cached_out, locked_out, of_other_builds


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path))
    return tmp_path / "compiled"


def test_a_compilation_has_its_folder_and_another_one_a_different_one(cache: Path) -> None:
    source = open_model("tiny:qwen3_moe")
    assert source.folder is not None
    rules, settings = dsl.load("auto"), {"use": "train"}
    first = cached_out(source, rules, settings, CPU)
    assert cached_out(source, dsl.load("auto"), dict(settings), CPU) == first
    assert first.parent == cache
    assert first.name.isidentifier()
    assert cache.stat().st_mode & 0o777 == 0o700
    others = {
        cached_out(source, rules, {"use": "serve"}, CPU),
        cached_out(source, dsl.load("moe-lora"), settings, CPU),
        cached_out(source, rules, settings, replace(CPU, threads=CPU.threads + 1)),
    }
    shard = source.folder / source.index.files[0] if source.index else source.folder
    os.utime(shard, ns=(0, 0))
    others.add(cached_out(source, rules, settings, CPU))
    assert len(others - {first}) == 4


def test_another_build_of_ktc_has_its_own_folder_and_finds_the_earlier_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rules = open_model("tiny:qwen3_moe"), dsl.load("auto")
    first, other = (cached_out(source, rules, {"use": use}, CPU) for use in ("train", "serve"))
    for folder in (first, other):
        folder.mkdir()
        (folder / "ktc.json").write_text("{}")
    assert not of_other_builds(first)
    monkeypatch.setattr(resources, "compiler_digest", lambda: "that of a later version")
    later = cached_out(source, rules, {"use": "train"}, CPU)
    assert later != first
    assert of_other_builds(later) == (first,)


@pytest.mark.parametrize("changed", ["include/ktc/interface/linear.hpp", "python/ktc_python/module.cpp"])
def test_a_build_of_ktc_is_known_by_its_text(changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    for name in ("grammar", "templates"):
        (tmp_path / name).mkdir()
    (runtime / changed).parent.mkdir(parents=True)
    (runtime / changed).write_text("struct Arguments { int rows; };")
    monkeypatch.setattr(resources, "_folder", lambda name: tmp_path / name)
    before = resources.compiler_digest.__wrapped__()
    assert resources.compiler_digest.__wrapped__() == before
    (runtime / "notes.txt").write_text("not compiled")
    assert resources.compiler_digest.__wrapped__() == before
    (runtime / changed).write_text("struct Arguments { long rows; };")
    assert resources.compiler_digest.__wrapped__() != before


def test_a_lock_says_whether_the_model_is_there(cache: Path) -> None:
    out = cache / "made"
    cache.mkdir()
    with locked_out(out) as exists:
        assert not exists
        out.mkdir()
    with locked_out(out) as exists:  # a folder without a manifest is not a compiled model
        assert not exists
        (out / "ktc.json").write_text("{}")
    with locked_out(out) as exists:
        assert exists


def shared(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)


def a_file(cache: Path) -> None:
    cache.write_text("")


@pytest.mark.parametrize(("spoil", "why"), [(shared, "others may write to it"), (a_file, "cannot be made")])
def test_a_cache_that_is_not_private_is_refused(cache: Path, spoil: Callable[[Path], None], why: str) -> None:
    source = open_model("tiny:qwen3_moe")
    spoil(cache)
    with pytest.raises(InputRefused, match="compiled") as refused:
        cached_out(source, dsl.load("auto"), {}, CPU)
    (problem,) = refused.value.diagnostics
    assert problem.code == "I160"
    assert why in problem.message
    assert "KTC_CACHE_DIR" in problem.hint


def test_a_cache_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_model("tiny:qwen3_moe")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputRefused) as refused:
        cached_out(source, dsl.load("auto"), {}, CPU)
    assert "it belongs to user" in refused.value.diagnostics[0].message
