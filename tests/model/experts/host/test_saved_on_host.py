"""Tensors that stay where they are until backward."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ktc.model.experts.host.saved_on_host import saved_in_place, saves_in_place, saves_products


def state() -> tuple[bool, bool]:
    return saves_in_place(), saves_products()


def test_the_contexts_of_one_thread_are_not_those_of_another() -> None:
    with ThreadPoolExecutor(1) as other:
        with saved_in_place(products=True):
            assert state() == (True, True)
            assert other.submit(state).result() == (False, False)
            with saved_in_place():
                assert state() == (True, False)
        assert state() == (False, False)
