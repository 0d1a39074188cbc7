"""Memory of saved activations is used again once nothing refers to it, and never before."""

from __future__ import annotations

import os

import pytest

from ktc.model.experts.layouts.saved_buffers import SMALLEST, SavedBuffers


def test_a_block_comes_back_when_its_last_tensor_is_gone() -> None:
    buffers = SavedBuffers()
    first = buffers.take(3 * SMALLEST)
    address = first.data_ptr()
    part = first[10:]
    del first
    assert buffers.free_bytes == 0
    del part
    assert buffers.free_bytes >= 3 * SMALLEST
    assert buffers.take(2 * SMALLEST).data_ptr() == address


def test_tensors_in_use_do_not_share_memory() -> None:
    buffers = SavedBuffers()
    one, other = buffers.take(SMALLEST).fill_(1), buffers.take(SMALLEST).fill_(2)
    assert one.unique().tolist() == [1]
    assert other.unique().tolist() == [2]


def test_blocks_too_small_are_given_up() -> None:
    buffers = SavedBuffers()
    buffers.take(SMALLEST)
    assert buffers.free_bytes > 0
    large = buffers.take(64 * SMALLEST)
    assert buffers.free_bytes == 0
    assert large.numel() == 64 * SMALLEST


def test_few_bytes_are_left_to_the_allocator() -> None:
    buffers = SavedBuffers()
    buffers.take(SMALLEST - 1)
    assert buffers.free_bytes == 0


def test_no_more_is_held_than_was_lent_at_once() -> None:
    buffers = SavedBuffers()
    for size in (256, 100, 40, 256, 100):
        lent = [buffers.take(size * SMALLEST) for _ in range(4)]
        assert buffers.held_bytes <= 4 * 256 * SMALLEST
        del lent
    assert 4 * 100 * SMALLEST <= buffers.free_bytes == buffers.held_bytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_forked_child_takes_though_its_parent_was_taking() -> None:
    buffers = SavedBuffers()
    with buffers._lock:  # pyright: ignore[reportPrivateUsage]
        child = os.fork()
        if child == 0:
            taken = buffers._lock.acquire(timeout=5)  # pyright: ignore[reportPrivateUsage]
            os._exit(0 if taken else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
