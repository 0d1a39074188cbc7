"""A stage tells of its steps, and is the same function whether or not anybody listens."""

from __future__ import annotations

from ktc.foundation.stage_progress import counted, listening
from ktc.model import twin
from ktc.stages.capture import capture, open_model


def test_steps_are_told_before_the_first_and_after_each() -> None:
    told: list[tuple[int, int]] = []
    with listening(lambda done, total: told.append((done, total))):
        assert list(counted("ab", 2)) == ["a", "b"]
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert list(counted("ab", 2)) == ["a", "b"]
    assert len(told) == 3, "the listener is gone"


def test_capture_tells_of_the_blocks_that_it_records_and_exports() -> None:
    told: list[tuple[int, int]] = []
    source = open_model(f"tiny:{next(iter(twin.moe_families()))}")
    with listening(lambda done, total: told.append((done, total))):
        captured = capture(source)
    blocks, graphs = len(captured.sites), len(captured.blocks)
    assert told[0] == (1, blocks)
    assert told[-1] == (graphs, graphs)
