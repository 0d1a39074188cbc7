"""Memory of saved activations is used again once nothing refers to it, and never before."""

from __future__ import annotations

from ktc.runtime.saved_buffers import SMALLEST, SavedBuffers


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
