"""Bars on a terminal: the time left of every stage that tells of its steps, and no bar that stays."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
from rich.console import Console

from ktc.cli import bars
from ktc.cli.session import Session
from ktc.foundation.stage_progress import counted

pytestmark = pytest.mark.usefixtures("term")


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_steps_have_a_bar_until_the_last() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), bars.steps_bar(Session(), "reading"):
        for _ in counted("abc", 3):
            pass
        during = terminal.getvalue()
    assert "reading" in during and "3/3" in during
    assert terminal.getvalue() == during, "the bar ended with its last step"


def test_a_bar_ends_with_an_error() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), pytest.raises(ValueError, match="broken"), bars.steps_bar(Session(), "reading"):
        for _ in counted("abc", 3):
            raise ValueError("broken")
    assert terminal.getvalue().count("\x1b[?25h") == 1, "the cursor is back"


def test_each_stage_has_a_bar_of_its_own() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), bars.stages_bar(Console(file=terminal), quiet=False) as running:
        running("capture", 0, None)
        running("capture", 1, 2)
        running("prove", 0, 4)
        running("prove", 1, 4)
    assert "capture" in terminal.getvalue()
    assert "prove" in terminal.getvalue()


def test_the_time_left_is_told_after_the_first_step() -> None:
    assert [bars._left(0, 4, 9.0), bars._left(4, 4, 9.0), bars._left(1, None, 9.0)] == ["", "", ""]  # pyright: ignore[reportPrivateUsage]
    assert bars._left(1, 4, 30.0) == "0:01:30 left"  # pyright: ignore[reportPrivateUsage]


def test_a_quiet_command_draws_nothing() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), bars.steps_bar(Session(quiet=True), "reading"):
        for _ in counted("abc", 3):
            pass
    with redirect_stderr(terminal), bars.stages_bar(Console(file=terminal), quiet=True) as running:
        running("capture", 1, 2)
    assert terminal.getvalue() == ""
