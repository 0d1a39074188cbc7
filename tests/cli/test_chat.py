"""`ktc generate MODEL` is a conversation on a terminal, and needs a prompt elsewhere. `ktc chat MODEL` always is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ktc.cli import app as cli
from ktc.cli import generate
from ktc.cli.session import Session


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The sampling and the system message of each conversation; no model is loaded."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(generate, "_open", lambda *_, **__: SimpleNamespace(streams=False))
    monkeypatch.setattr(generate, "_converse", lambda session, opened, *settings: seen.append(settings))
    return seen


@pytest.mark.parametrize("line", ["generate tiny:qwen3_moe", "generate tiny:qwen3_moe --chat", "chat tiny:qwen3_moe"])
def test_a_terminal_without_a_prompt_is_a_conversation(
    line: str, conversations: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "is_conversation", property(lambda session: True))
    options = "--temperature 0.5 --top-k 3 --stop x --stop y --seed 7 --max-new-tokens 9 --system s"
    assert cli.main([*line.split(), *options.split()]) == 0
    ((sampling, system),) = conversations
    assert (sampling.temperature, sampling.top_k, sampling.stop, sampling.seed) == (0.5, 3, ("x", "y"), 7)
    assert (sampling.max_new_tokens, system) == (9, "s")


@pytest.mark.parametrize("line", ["generate tiny:qwen3_moe", "generate tiny:qwen3_moe --json"])
def test_elsewhere_a_prompt_is_needed(
    line: str, conversations: list[tuple[Any, ...]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    assert "error[G700]" in capfd.readouterr().err
    assert cli.main(["chat", "tiny:qwen3_moe"]) == 0
    assert len(conversations) == 1
