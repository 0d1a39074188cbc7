"""A LLaMA-Factory YAML that cannot be run on a compiled model is refused by name, before LLaMA-Factory is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import yaml

from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import environment, versions
from ktc.tools.llama_factory.run import train
from ktc.tools.llama_factory.settings import Request, check_installed, read_request

Read = Callable[..., Request]


@pytest.fixture
def read(compiled: Path, tmp_path: Path) -> Read:
    """`read(*words, **settings)`: a request of a good file, but for those settings."""

    def call(*words: str, **settings: object) -> Request:
        file = tmp_path / "x.yaml"
        good = {"model_name_or_path": str(compiled), "trust_remote_code": True, "stage": "sft", "do_train": True}
        file.write_text(yaml.safe_dump({**good, **settings}), encoding="utf-8")
        return read_request(file, words)

    return call


def codes(refused: pytest.ExceptionInfo[InputRefused]) -> list[str]:
    return [diagnostic.code for diagnostic in refused.value.diagnostics]


def test_a_good_file_is_read_and_words_go_before_it(read: Read, compiled: Path) -> None:
    request = read("lora_target=rules", "output_dir=there", "adapter_name_or_path=a,b", output_dir="here")
    assert (request.model, request.output) == (compiled, Path("there"))
    assert (request.stage, request.do_train, request.by_rules) == ("sft", True, True)
    assert request.adapters == ("a", "b")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"use_kt": True}, "F906"),
        ({"stage": "ppo"}, "F907"),
        ({"model_name_or_path": "Qwen/Qwen3-30B-A3B"}, "F908"),
        ({"model_name_or_path": None}, "F908"),
        ({"lora_target": "q_b_proj"}, "F909"),
        ({"lora_target": "rules", "lora_rank": 16}, "F910"),
        ({"finetuning_type": "full"}, "F911"),
        ({"quantization_bit": 4}, "F911"),
        ({"deepspeed": "ds.json"}, "F911"),
        ({"trust_remote_code": False}, "F912"),
    ],
)
def test_a_setting_is_refused_by_name(read: Read, settings: dict[str, object], code: str) -> None:
    with pytest.raises(InputRefused) as refused:
        read(**settings)
    assert codes(refused) == [code]


def test_everything_wrong_is_told_together(read: Read) -> None:
    with pytest.raises(InputRefused) as refused:
        read(use_kt=True, stage="rm", lora_target=["o_proj", "gate_up_proj", "w1"])
    assert codes(refused) == ["F906", "F907", "F909", "F909"]
    assert "`w1`" in refused.value.diagnostics[-1].message


@pytest.mark.parametrize(
    "target", ["all", "rules", "o_proj", "model.layers.0.self_attn.o_proj", ["o_proj", "kv_b_proj"]]
)
def test_targets_that_hit_are_taken(read: Read, target: object) -> None:
    assert read(lora_target=target).by_rules == (target == "rules")


@pytest.mark.parametrize("word", ["--max_steps", "max_steps", "=3", "max_steps=[3"])
def test_a_word_that_is_no_setting_is_refused(read: Read, word: str) -> None:
    with pytest.raises(InputRefused) as refused:
        read(word)
    assert set(codes(refused)) == {"F905"}


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("x.txt", b"stage: sft", "F903"),
        ("x.yaml", None, "F903"),
        ("x.yaml", b"\xff\xfe: 1", "F903"),
        ("x.yaml", b"stage: [sft", "F904"),
        ("x.yaml", b"- sft", "F904"),
        ("x.yaml", b"", "F904"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, content: bytes | None, code: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputRefused) as refused:
        read_request(tmp_path / name, ())
    assert codes(refused) == [code]


def test_without_llama_factory_the_host_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: None)
    with pytest.raises(HostLacks, match="F901"):
        check_installed()


def test_an_untested_llama_factory_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: "0.9.6")
    assert [(found.code, found.severity) for found in check_installed()] == [("F902", "warning")]
    monkeypatch.setattr(versions, "installed", lambda _: "0.9.5")
    assert check_installed() == ()


# USE_KT


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without the variables that these functions set; it comes back as it was."""
    for name in ("USE_KT", "ACCELERATE_BYPASS_DEVICE_MAP", *TORCHRUN):
        monkeypatch.setenv(name, "")  # so that the end of the test takes away what the test has made of it
        monkeypatch.delenv(name)
    return monkeypatch


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("y", True), ("0", False), ("", False)])
def test_use_kt_is_read_as_llama_factory_reads_it(bare: pytest.MonkeyPatch, value: str, on: bool) -> None:
    bare.setenv("USE_KT", value)
    environment.apply_use_kt()
    assert os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP") == ("true" if on else None)


def test_what_the_user_has_set_stays(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "false")
    environment.switch_on_kt()
    environment.apply_use_kt()
    assert os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] == "false"


def test_one_process_becomes_a_process_group_only_outside_torchrun(bare: pytest.MonkeyPatch) -> None:
    environment.join_world_of_one()
    assert [os.environ[name] for name in TORCHRUN[:4]] == ["0", "0", "1", "1"]
    bare.setenv("WORLD_SIZE", "2")
    bare.setenv("RANK", "1")
    environment.join_world_of_one()
    assert os.environ["RANK"] == "1"


def test_processes_that_nobody_starts_are_refused(bare: pytest.MonkeyPatch, read: Read) -> None:
    bare.setenv("NPROC_PER_NODE", "2")
    with pytest.raises(InputRefused, match="F913"):
        train(read())


def test_only_errors_before_the_first_step_concern_settings() -> None:
    from transformers import AutoConfig

    from ktc.tools.llama_factory.run import its_refusals, telling

    begun = Event()
    with pytest.raises(InputRefused, match="F920"), its_refusals(begun):
        AutoConfig.for_model("nothing")
    assert telling(begun, len)("step") == 4
    with pytest.raises(ValueError, match="nothing"), its_refusals(begun):
        AutoConfig.for_model("nothing")
