"""Some calls of quick commands fail or are the last; `make reliability` tries every call of every command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ktc.host import find_compiler
from reliability.commands import COMMANDS, Command
from reliability.faults import ENDING, ERRORS, KILL
from reliability.sweep import Sweep, points

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    made = Sweep(tmp_path_factory.mktemp("sweep"))
    with made.forked:
        yield made


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name.replace(" ", "_"))
def test_a_fault_at_some_calls_breaks_no_promise(sweep: Sweep, command: Command) -> None:
    row = sweep.sweep(command, (*ERRORS, *ENDING, KILL), lambda calls: points(calls, 4))
    assert row.broken == []
