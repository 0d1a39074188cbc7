"""`ktc train`, `generate` and `serve` take a compiled model, or a MODEL that they compile first into the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktc import compiler
from ktc.cli import app as cli
from ktc.cli.compiling import settings_of
from ktc.cli.given_model import (
    Wish,
    compiled,
    display_name,
    is_compiled,
    named_after,
    original_folder,
    run_compiled,
    shown,
    shown_once,
    tell_random_weights,
)
from ktc.cli.session import Session
from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import resources
from ktc.foundation.host import Gpu, detect
from ktc.model.twin import default_config, shrink
from ktc.stages.capture import open_model
from ktc.stages.plan.placement import BUDGET_SHARE

WISH = Wish.of("generate", recompile=False, trust=False, weights=None)


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each compilation; it writes a manifest instead of a model."""
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "cache"))
    seen: list[dict[str, Any]] = []

    def record(model: str, rules: str, out: Path, **options: Any) -> Path:
        seen.append({"model": model, "rules": rules, **options})
        out.mkdir(exist_ok=True)
        (out / "ktc.json").write_text("{}")
        return out

    monkeypatch.setattr(compiler, "compile", record)
    monkeypatch.setattr("ktc.cli.report.StageReport.warn", lambda report: None)
    return seen


def test_a_model_is_compiled_once_and_again_when_asked(compilations: list[dict[str, Any]]) -> None:
    first = compiled(Session(quiet=True), "tiny:qwen3_moe", WISH)
    assert compiled(Session(quiet=True), "tiny:qwen3_moe", WISH) == first
    assert [(one["rules"], one["settings"], one["force"]) for one in compilations] == [
        ("auto", {"use": "generate"}, False)
    ]
    again = Wish.of("generate", recompile=True, trust=False, weights=None)
    assert compiled(Session(quiet=True), "tiny:qwen3_moe", again) == first
    assert compilations[1]["force"]
    adapted = Wish.of("train", recompile=False, trust=False, weights=None, experts=True)
    assert compiled(Session(quiet=True), "tiny:qwen3_moe", adapted) != first
    assert compilations[2]["settings"] == {"use": "train", "experts": "true"}


def test_a_model_is_compiled_again_by_a_later_build_of_ktc_which_says_so(
    compilations: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = compiled(Session(), "tiny:qwen3_moe", WISH)
    assert "another version" not in capfd.readouterr().err
    monkeypatch.setattr(resources, "compiler_digest", lambda: "that of a later version")
    second = compiled(Session(), "tiny:qwen3_moe", WISH)
    assert second != first and len(compilations) == 2 and not compilations[1]["force"]
    told = capfd.readouterr().err
    assert "compiled before by another version of ktc" in told and f"`rm -r {first}` frees up to 2 B" in told
    assert compiled(Session(), "tiny:qwen3_moe", WISH) == second
    assert compiled(Session(), str(first), WISH) == first and len(compilations) == 2  # named by the user
    assert "another version" not in capfd.readouterr().err


def test_the_text_alone_of_a_model_is_compiled_into_another_folder(
    compilations: list[dict[str, Any]], tmp_path: Path
) -> None:
    shrink(default_config("qwen3_5_moe", whole=True)).save_pretrained(tmp_path / "m")
    alone = Wish.of("generate", recompile=False, trust=False, weights=None, text_only=True)
    folders = [compiled(Session(quiet=True), str(tmp_path / "m"), wish) for wish in (WISH, alone, alone)]
    assert folders[0] != folders[1] == folders[2]
    assert [one["text_only"] for one in compilations] == [False, True]


def test_a_gguf_file_without_its_config_is_told_what_is_missing(
    tmp_path: Path, compilations: list[dict[str, Any]]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert not is_compiled(str(file)) and not is_compiled(str(tmp_path))
    for given, hint in ((file, "next to the file"), (tmp_path, "next to the GGUF file")):
        with pytest.raises(InputRefused) as refused:
            open_model(str(given))
        assert f"config.json and the tokenizer of the original {hint}" in refused.value.diagnostics[0].hint


def test_a_compiled_model_is_taken_as_it_is(tmp_path: Path, compilations: list[dict[str, Any]]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "ktc.json").write_text("{}")
    assert compiled(Session(), str(out), WISH) == out
    assert not compilations
    for idle in (
        Wish.of("train", recompile=True, trust=False, weights=None),
        Wish.of("train", recompile=False, trust=False, weights=None, experts=True),
        Wish.of("train", recompile=False, trust=False, weights=None, text_only=True),
    ):
        with pytest.raises(InputRefused, match="is compiled already") as refused:
            compiled(Session(), str(out), idle)
        assert refused.value.diagnostics[0].code == "U006"


def test_weights_of_a_model_are_its_own(tmp_path: Path) -> None:
    elsewhere = Wish.of("serve", recompile=False, trust=False, weights=tmp_path)
    with pytest.raises(InputRefused, match="is a model with its weights"):
        compiled(Session(), "tiny:qwen3_moe", elsewhere)


def test_arguments_are_models_or_compiled_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("checkpoint", "config.json"), ("out", "ktc.json"), ("damaged", "weights.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / file).write_text("{}")
    (tmp_path / "empty").mkdir()
    models = ("tiny:qwen3_moe", "checkpoint", "owner/name")
    outs = ("out", "damaged", "empty", "missing", "out/missing", "./a/b")
    assert [is_compiled(given) for given in (*models, *outs)] == [False] * len(models) + [True] * len(outs)
    assert (shown("tiny:qwen3_moe"), shown("out")) == ("tiny:qwen3_moe", Path("out"))
    assert named_after("tiny:qwen3_moe").name == "qwen3_moe"
    assert [display_name(given) for given in models] == ["qwen3_moe", "checkpoint", "owner/name"]


def test_a_small_model_is_an_original_with_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path))
    assert list(original_folder("tiny:qwen3_moe").glob("*.safetensors"))
    assert original_folder(tmp_path) == tmp_path


def test_options_become_settings_of_the_rules_that_have_them() -> None:
    assert settings_of(["rank=2"], "auto", "serve") == {"rank": "2", "use": "serve"}
    assert settings_of(None, "auto", experts=True) == {"experts": "true"}
    with pytest.raises(InputRefused) as refused:
        settings_of(None, "moe-lora", "train", experts=True)
    assert [one.code for one in refused.value.diagnostics] == ["U006", "U006"]


def test_adapters_that_nothing_trains_are_refused_at_their_requirement(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "auto", "--for", "serve", "--experts"]) == 2
    said = capfd.readouterr().err
    assert said.count("error[") == 1
    assert "error[M063]: requirement not met: adapters are for training" in said
    assert "`$use` is `serve`" in said


def test_a_run_without_gpu_memory_steps_down_to_a_smaller_plan(
    tmp_path: Path,
    compilations: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    here = replace(detect(), gpus=(Gpu("card", 32 << 30),))
    hosts = iter((here,))  # asked once: later the model itself takes memory
    monkeypatch.setattr("ktc.foundation.measured_host.this_host", lambda: next(hosts))
    planned = iter(({"cuda:0": 20 << 30}, {"cuda:0": 10 << 30}, {"cpu": 1}))
    monkeypatch.setattr(
        "ktc.model.manifest.manifest.read_manifest", lambda out: SimpleNamespace(memory=next(planned))
    )  # fmt: skip
    outs = list[Path]()

    def run(out: Path) -> str:
        outs.append(out)
        if len(outs) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return "done"

    assert run_compiled(Session(), "tiny:qwen3_moe", WISH, run) == "done"
    assert len(set(outs)) == 3
    budgets = [one["host"].gpus[0].free * BUDGET_SHARE / 2**30 for one in compilations]
    assert budgets == pytest.approx([32 * BUDGET_SHARE, 17, 8.5])
    warned = capfd.readouterr().err
    assert warned.count("warning[U118]") == 2 and "2.00 GiB requested" in warned


def test_a_run_without_gpu_memory_ends_where_ktc_may_not_choose(
    tmp_path: Path, compilations: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(out: Path) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("ktc.model.manifest.manifest.read_manifest", lambda out: SimpleNamespace(memory={"cpu": 1}))
    with pytest.raises(torch.OutOfMemoryError):
        run_compiled(Session(quiet=True), "tiny:qwen3_moe", WISH, run)  # its plan uses no GPU
    assert len(compilations) == 1
    (tmp_path / "ktc.json").write_text("{}")
    with pytest.raises(torch.OutOfMemoryError):
        run_compiled(Session(quiet=True), str(tmp_path), WISH, run)
    assert len(compilations) == 1


def test_a_small_model_says_that_its_weights_are_random_until_an_adapter_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path))
    names = {"tiny": str(tmp_path / "models" / "qwen3_moe-12ab"), "real": "/models/qwen3_moe-12ab"}
    monkeypatch.setattr(
        "ktc.model.manifest.manifest.read_manifest",
        lambda out: SimpleNamespace(model=SimpleNamespace(name=names[out.name])),
    )  # fmt: skip
    for out, adapters, weights in (("real", (), None), ("tiny", (tmp_path,), None), ("tiny", (None,), tmp_path)):
        tell_random_weights(Session(), Path(out), adapters, weights)
    assert not capfd.readouterr().err
    tell_random_weights(Session(), Path("tiny"), (None,), None)
    assert "`tiny:qwen3_moe` has random weights" in capfd.readouterr().err


def test_an_answer_is_not_repeated_after_its_first_token() -> None:
    written: list[str] = []
    session: Any = SimpleNamespace(stream=written.append)

    def answer(*tokens: str) -> None:
        with shown_once(session) as write:
            for token in tokens:
                write(token)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError):  # a smaller plan answers
        answer()
    with pytest.raises(HostLacks, match="U116"):
        answer("half", " an")
    assert written == ["half", " an", "\n"]
