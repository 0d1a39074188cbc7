"""The clients of the load test: what becomes of each request is recorded, and summed up."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_servers import served

from ktc.cli import app as cli
from ktc.inference.serving import server as serve
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.models import open_served_models
from ktc.inference.serving.request import Limits
from ktc.tools.bench.load import Load, Outcome, drive
from ktc.tools.bench.serve import Phase, measure

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in serve.PACKAGES), reason="the extra `serve` is not installed"
    ),
]
SHORT = {"prompt": (3, 9), "new_tokens": (24, 32)}


@pytest.fixture(scope="module")
def address(compiled: Path) -> Iterator[str]:
    with served(open_served_models(compiled, reference=True), Limits(batch=4)) as url:
        yield url


def test_every_request_is_answered_or_cancelled_and_none_is_left(address: str) -> None:
    report = measure(address, Load(1, 0, **SHORT), Load(6, 0, **SHORT, cancelled=1.0))
    one, many, left = report.one_client, report.clients, report.server
    assert (one.answered, one.cancelled, one.failed) == (1, 0, {})
    assert (many.answered, many.cancelled, many.failed) == (3, 3, {})
    assert left["ktc_requests_running"] == left["ktc_requests_waiting"] == 0
    assert left['ktc_requests_total{model="v2_twin",outcome="cancelled"}'] == 3
    assert report.to_json()["ratio"] == many.tokens_per_second / one.tokens_per_second


def test_a_fault_is_a_failure_of_its_requests(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(batch: RowBatch) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(RowBatch, "step", failing)
    outcomes, _ = asyncio.run(drive(address, Load(2, 0, **SHORT)))
    states = {each.streamed: each.state for each in outcomes}
    assert "error" in states[True] and "500" in states[False]


def test_figures_are_of_the_outcomes() -> None:
    outcomes = [
        Outcome("answered", True, 5, 2.0, 0.5, (0.1, 0.3)),
        Outcome("answered", False, 7, 4.0),
        Outcome("cancelled", True, 3, 1.0, 0.7, (0.2,)),
        Outcome("no answer", False, 0, 9.0),
    ]
    found = Phase.of(Load(2, 5), outcomes, 5.0, 3.0)
    assert (found.answered, found.cancelled, found.failed) == (2, 1, {"no answer": 1})
    assert (found.tokens, found.tokens_per_second, found.tokens_per_cpu_second) == (15, 3.0, 5.0)
    assert (found.first_token, found.next_token, found.request) == ((0.7, 0.7), (0.2, 0.3), (4.0, 4.0))


def test_lengths_are_two_numbers(compiled: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", str(compiled), "--prompt", "9"]) != 0
    assert "G725" in capfd.readouterr().err
