"""The folder OUT: what is in it, that it is whole or absent, and that everybody who loads models can use it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType

import pytest
from forks import in_a_child, kill_this
from transformers import AutoTokenizer

from ktc.diagnostics import HostLacks, InputRefused, KtcError
from ktc.foundation import files
from ktc.stages.link import adapter_json, check_out, folder, link, rule_files
from ktc.stages.link.folder import write_folder
from ktc.stages.plan import LoraPlan


def fill(path: Path) -> None:
    (path / "lib").mkdir()
    (path / "lib" / "a.bin").write_bytes(b"x" * 1000)
    (path / "ktc.json").write_text("{}")


def refused(out: Path, force: bool = False) -> tuple[str, str, str]:
    with pytest.raises(KtcError) as refusal:
        check_out(out, force)
    (diagnostic,) = refusal.value.diagnostics
    return diagnostic.code, diagnostic.message, diagnostic.hint


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("v2-lite", "v2_lite"),
        ("2model", "model_2model"),
        ("class", "model_class"),
        ("a b.c", "a_b_c"),
        ("--", "compiled"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused_with_one_that_can(
    tmp_path: Path, name: str, suggestion: str
) -> None:
    code, _, hint = refused(tmp_path / name)
    assert code == "I140"
    assert hint == f"try `-o {tmp_path / suggestion}`"


@pytest.mark.parametrize("name", ["json", "torch", "ktc", "sys", "numpy"])
def test_a_name_that_shadows_a_module_is_refused(tmp_path: Path, name: str) -> None:
    code, message, hint = refused(tmp_path / name)
    assert (code, f"`{name}`" in message, name + "_ktc" in hint) == ("I141", True, True)


def test_what_exists_is_replaced_only_if_it_is_a_compiled_model_and_asked_for(tmp_path: Path) -> None:
    model, other, file = tmp_path / "model_a", tmp_path / "other_b", tmp_path / "file_c"
    write_folder(model, fill)
    other.mkdir()
    file.write_text("")
    assert refused(model)[0] == "I142"
    assert "--force" in refused(model)[2]
    for path in (other, file):
        assert refused(path, force=True)[0] == "I142"
    (model / "stale").write_text("")
    write_folder(model, fill, force=True)
    assert sorted(path.name for path in model.iterdir()) == ["ktc.json", "lib"]
    assert not list(tmp_path.glob(".*")), "neither the new nor the old folder is left beside it"


def test_a_folder_that_is_already_on_the_path_may_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "made_before"
    write_folder(out, fill)
    (out / "__init__.py").write_text("")
    check_out(out, force=True)


def test_a_place_that_cannot_hold_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file" / "deeper" / "out_a")[0] == "I143"
    monkeypatch.setattr(files, "_made_and_locked", failing)
    assert refused(tmp_path / "out_a") == (
        "I143",
        f"OUT cannot be made in `{tmp_path}`: No space left on device",
        "free some space and run it again",
    )


def failing(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(path: Path) -> None:
    fill(path)
    failing()


def interrupted(path: Path) -> None:
    fill(path)
    raise KeyboardInterrupt


@pytest.mark.parametrize("broken", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_nothing_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken != "write":
        monkeypatch.setattr(os, broken, failing)
    with pytest.raises(HostLacks, match=r"I145.*No space left on device") as refusal:
        write_folder(tmp_path / "new" / "deep" / "out_a", full_disk if broken == "write" else fill)
    assert "free some space" in refusal.value.diagnostics[0].hint
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "new" / "out_a", interrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["write", "rename"])
def test_a_failed_replacement_keeps_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    out = tmp_path / "out_a"
    write_folder(out, fill)
    (out / "mine").write_text("old")
    if broken == "rename":
        monkeypatch.setattr(folder, "_exchange", lambda *_: False)
        rename, calls = os.rename, iter([False, True, False])
        monkeypatch.setattr(os, "rename", lambda a, b: failing() if next(calls) else rename(a, b))
    with pytest.raises(HostLacks, match="I145"):
        write_folder(out, full_disk if broken == "write" else fill, force=True)
    assert (out / "mine").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out_a"]


def test_a_killed_compile_leaves_nothing_at_out_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    out = tmp_path / "out_a"

    def fill_half(path: Path) -> None:
        (path / "ktc.json").write_text("{}")
        kill_this()

    assert in_a_child(lambda: write_folder(out, fill_half)) == -signal.SIGKILL
    assert not out.exists()
    write_folder(out, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["out_a"]


def replace_and_die(out: Path, way: str) -> None:
    """Replace OUT, killed behind the first step: the exchange of the folders, or the first of two renames."""
    rename = os.rename

    def rename_once(source: Path, target: Path) -> None:
        rename(source, target)
        kill_this()

    os.rename = rename_once  # pyright: ignore[reportAttributeAccessIssue]
    if way == "two steps":
        folder._exchange = lambda *_: False
    else:
        exchange = folder._exchange
        folder._exchange = lambda *paths: (exchange(*paths), kill_this())
    write_folder(out, lambda path: (path / "ktc.json").write_text("new"), force=True)


@pytest.mark.parametrize("way", ["exchange", "two steps"])
def test_a_kill_while_replacing_loses_no_model(tmp_path: Path, way: str) -> None:
    out = tmp_path / "out_a"
    write_folder(out, fill)
    assert in_a_child(lambda: replace_and_die(out, way)) == -signal.SIGKILL
    assert out.exists() == (way == "exchange")
    with pytest.raises(InputRefused, match="I142"):
        write_folder(out, failing)
    assert (out / "ktc.json").read_text() == ("new" if way == "exchange" else "{}")
    write_folder(out, fill, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out_a"]


def test_a_writer_that_lives_is_not_swept(tmp_path: Path) -> None:
    out = tmp_path / "out_a"

    def with_another(beside: Path) -> None:
        fill(beside)
        write_folder(out, fill)
        assert (beside / "ktc.json").is_file()

    write_folder(out, with_another, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out_a"]


def test_rule_files_keep_their_place_and_never_their_machine_path(tmp_path: Path) -> None:
    expected = {"std/moe.ktr": "bundled", "mine.ktr": "entry", "parts/mine.ktr": "imported"}
    for root in ("", "rules/", f"{tmp_path}/"):
        sources = {"std/moe.ktr": "bundled", f"{root}mine.ktr": "entry", f"{root}parts/mine.ktr": "imported"}
        assert rule_files(sources, f"{root}mine.ktr") == expected


def test_layers_that_peft_mistakes_for_experts_are_named_by_their_weights() -> None:
    targets = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.shared_experts.up_proj")
    adapter = adapter_json(LoraPlan(targets, (), 8, 32, 0.0, {targets[1]: 4}, {}, 0))
    assert adapter["target_modules"] == [targets[0]]
    assert adapter["target_parameters"] == [f"{targets[1]}.weight"]
    assert adapter["rank_pattern"] == {f"{targets[1]}.weight": 4}
    with pytest.raises(InputRefused, match="I150"):
        adapter_json(LoraPlan(targets, (), 8, 32, 0.1, {}, {}, 0))


def test_code_of_a_checkpoint_never_reaches_out(
    checkpoint: Path, hand_made: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = tmp_path / "hostile"
    shutil.copytree(checkpoint, hostile)
    proof = tmp_path / "it_ran"
    for name in ("tokenization_evil.py", "tokenizer_evil.py", "chat_template.py", "vocab.so"):
        (hostile / name).write_text(f"open({str(proof)!r}, 'w')\n")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        content = json.loads((hostile / name).read_text())
        content["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Evil", None], "AutoConfig": "tokenizer_evil.Evil"}
        text = json.dumps(content)
        escaped = text.replace("auto_map", "\\u0061uto_map") if name == "generation_config.json" else text
        (hostile / name).write_text(escaped)
    out = link(hand_made.package(hostile), tmp_path / "linked")
    assert {path.name for path in out.rglob("*.py")} == {"__init__.py", "modeling_ktc.py"}
    assert not (out / "vocab.so").exists()
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert "auto_map" not in json.loads((out / name).read_text())
    assert list(json.loads((out / "config.json").read_text())["auto_map"]) == ["AutoModelForCausalLM"]
    assert len(AutoTokenizer.from_pretrained(out, trust_remote_code=True)) > 256
    assert not proof.exists()
    assert "warning[I146]" in caplog.text
    assert "`tokenization_evil.py`" in caplog.text and "`auto_map` of `tokenizer_config.json`" in caplog.text
