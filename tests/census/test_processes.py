"""The processes of the census promise: a row for every family, one that hangs or dies too, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

import pytest
from odd_families import examine

from census import default_jobs, examine_all, processes
from ktc.foundation.host import available_memory, usable_threads


@pytest.mark.slow
def test_a_family_that_hangs_or_dies_is_a_row_with_its_reason() -> None:
    rows = {row.family: row for row in examine_all(["hangs", "dies", "runs"], 2, 1.0, examine)}
    assert rows["runs"].matched and not rows["runs"].reasons
    assert rows["dies"].reasons == ("its process ended with exit code -9",)
    assert rows["hangs"].reasons == ("not finished after 1 s (--timeout)",)
    assert rows["hangs"].experts == "opaque: not reached"
    assert not multiprocessing.active_children()


def test_the_processes_end_with_the_iterator() -> None:
    rows = examine_all(["runs", "hangs"], 2, 600.0, examine)
    assert next(rows).family == "runs"
    assert multiprocessing.active_children()
    rows.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_server_of_forks_that_was_killed_is_started_again() -> None:
    assert [row.reasons for row in examine_all(["runs"], 1, 600.0, examine)] == [()]
    server: int = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)  # and not waited for: it may be dying when the next process is asked of it
    assert [row.reasons for row in examine_all(["runs"], 1, 600.0, examine)] == [()]
    assert forkserver._forkserver._forkserver_pid != server


def test_a_process_that_cannot_be_started_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    errors = iter((EOFError(), EOFError(), EOFError(), refused, refused, refused))

    def refuse(process: ForkServerProcess) -> None:
        raise next(errors)

    monkeypatch.setattr(ForkServerProcess, "start", refuse)
    monkeypatch.setattr(processes, "_PAUSES", (0.0, 0.0))
    rows = list(examine_all(["runs", "hangs"], 2, 600.0, examine))
    assert [row.family for row in rows] == ["runs", "hangs"]
    assert [row.reasons[0].partition("started: ")[2] for row in rows] == ["EOFError", str(refused)]


def test_no_more_families_run_at_once_than_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= default_jobs() <= usable_threads()
    assert available_memory() > 0
    monkeypatch.setattr("census.processes.available_memory", lambda: 1 << 20)
    assert default_jobs() == 1
