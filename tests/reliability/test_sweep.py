"""Some calls of quick commands fail or are the last; `make reliability` tries every call of every command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ktc.foundation.host import find_compiler
from reliability.commands import COMMANDS, Command
from reliability.faults import ENDING, ERRORS, KILL
from reliability.sweep import Sweep, points
from reliability.workers import Workers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(tmp_path_factory.mktemp("sweep"), 1) as made:
        yield made


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name.replace(" ", "_"))
def test_a_fault_at_some_calls_breaks_no_promise(workers: Workers, command: Command) -> None:
    sweep = Sweep(workers, [command])
    sweep.count((*ERRORS, *ENDING, KILL))
    tries = sweep.tries(lambda _, calls: points(calls, 4))
    assert len(list(sweep.run(tries))) == len(tries) > 0
    assert sweep.rows[command.name].broken == []


def test_a_sweep_goes_on_from_its_file(workers: Workers, tmp_path: Path) -> None:
    command = next(each for each in COMMANDS if each.name == "fmt")

    def sweep() -> Sweep:
        made = Sweep(workers, [command], tmp_path / "runs")
        made.count(("EIO", KILL))
        return made

    first = sweep()
    tries = first.tries(lambda _, calls: points(calls, 2))
    list(first.run(tries[:3]))
    second = sweep()
    assert second.tries(lambda _, calls: points(calls, 2)) == tries[3:]
    assert second.rows["fmt"].ended.total() == 3
