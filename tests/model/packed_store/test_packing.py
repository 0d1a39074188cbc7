"""Experts are packed on threads: all before `finish` returns, few at a time, errors in their order."""

from __future__ import annotations

import threading

import pytest
import torch

from ktc.foundation import host
from ktc.model.packed_store import packing as packing_module
from ktc.model.packed_store.packing import Packing


def test_all_are_packed_before_it_finishes_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 3)
    packed, graded, names = set[int](), set[bool](), set[str]()

    def pack(number: int) -> None:
        packed.add(number)
        graded.add(torch.is_grad_enabled())
        names.add(threading.current_thread().name)

    with Packing() as packing:
        for number in range(20):
            packing.add(lambda number=number: pack(number))
        packing.finish()
        assert packed == set(range(20)) and graded == {False}
        assert threading.main_thread().name not in names


def test_the_first_error_is_raised_and_nothing_more_is_packed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 1)
    packed = list[int]()

    def fail(number: int) -> None:
        raise ValueError(f"expert {number}")

    with pytest.raises(ValueError, match="expert 0"), Packing() as packing:
        packing.add(lambda: fail(0))
        packing.add(lambda: fail(1))
        packing.add(lambda: packed.append(2))
        packing.finish()
    assert packed == []


def test_operations_of_a_packing_thread_open_no_threads_and_others_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 2)
    before, inside = torch.get_num_threads(), set[int]()
    torch.set_num_threads(3)
    try:
        with Packing() as packing:
            for _ in range(4):
                packing.add(lambda: inside.add(torch.get_num_threads()))
            packing.finish()
        assert (inside, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_no_more_bytes_wait_than_a_bound_or_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    monkeypatch.setattr(packing_module, "_MOST_BYTES", 10)
    begun, may_end, waiting = threading.Semaphore(0), threading.Event(), list[int]()

    def pack() -> None:
        begun.release()
        assert may_end.wait(60)

    def seen(packing: Packing, nbytes: int) -> None:
        packing.add(lambda: None, nbytes)
        waiting.append(packing._nbytes)

    with Packing() as packing:
        packing.add(pack, 4)
        seen(packing, 6)
        assert begun.acquire(timeout=60)
        may_end.set()
        for nbytes in (5, 5, 5, 30, 1):
            seen(packing, nbytes)
        packing.finish()
        assert packing._nbytes == 0
    assert waiting == [10, 5, 10, 10, 30, 1]
