"""The ring that weights pass through: the right bytes at the right time, ahead of their use."""

from __future__ import annotations

import gc
import random
from collections.abc import Collection, Iterator

import pytest
import torch

from ktc.model.experts.host.saved_on_host import HostOffloaded, SavedOnHost
from ktc.model.experts.streamed.stream_ring import Ring, StreamSource, ring_of, rings

CPU = torch.device("cpu")
PIECES = 5


class Owner:
    pass


OWNER = Owner()


def source(size: int, seed: int) -> StreamSource:
    storage = torch.randint(0, 255, (PIECES * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return StreamSource(storage, storage.split(size), OWNER)


def use(ring: Ring, source: StreamSource, wanted: Collection[int] = range(PIECES), *, reverse: bool = False) -> None:
    with ring.visit(source, wanted, reverse=reverse) as take:
        for number in reversed(range(PIECES)) if reverse else range(PIECES):
            if number in wanted:
                assert torch.equal(take(number), source.pieces[number])


def step(ring: Ring, sources: list[StreamSource]) -> None:
    for each in sources:
        use(ring, each)
    for each in reversed(sources):
        use(ring, each, reverse=True)


@pytest.mark.parametrize("nbytes", [1000, 1500, 3000, 100_000])
def test_a_step_that_comes_again_is_sent_ahead_and_once(nbytes: int) -> None:
    ring = Ring(CPU, nbytes)
    sources = [source(size, seed) for seed, size in enumerate((300, 999, 256, 700))]
    for _ in range(2):
        step(ring, sources)
    before = ring.figures()
    step(ring, sources)
    after = ring.figures()
    assert after.sent - before.sent == 2 * sum(each.storage.nbytes for each in sources)
    assert after.dropped == before.dropped
    assert ring.figures().bus_speed > 0


@pytest.mark.parametrize("nbytes", [999, 2500, 8000])
def test_any_order_of_visits_and_pieces_gets_the_right_bytes(nbytes: int) -> None:
    ring, chance = Ring(CPU, nbytes), random.Random(nbytes)
    sources = [source(size, seed) for seed, size in enumerate((300, 999, 256, 700))]
    for _ in range(300):
        wanted = chance.sample(range(PIECES), chance.randrange(PIECES + 1))
        use(ring, chance.choice(sources), wanted, reverse=chance.random() < 0.5)
    figures = ring.figures()
    assert 0 < figures.dropped < figures.sent


def test_recomputation_inside_backward_is_foreseen() -> None:
    ring, sources = Ring(CPU, 4000), [source(500, seed) for seed in range(3)]

    def checkpointed() -> None:
        for each in sources:
            use(ring, each)
        for each in reversed(sources):
            use(ring, each)
            use(ring, each, reverse=True)

    for _ in range(2):
        checkpointed()
    before = ring.figures()
    checkpointed()
    assert ring.figures().dropped == before.dropped


def test_an_abandoned_visit_leaves_the_ring_usable() -> None:
    ring, given = Ring(CPU, 1200), source(300, 0)

    def chunks() -> Iterator[torch.Tensor]:
        with ring.visit(given, range(PIECES)) as take:
            for number in range(PIECES):
                yield take(number)

    next(chunks())
    gc.collect()
    use(ring, given)


def test_a_ring_refuses_what_it_cannot_hold() -> None:
    ring, given = Ring(CPU, 100), source(101, 0)
    with pytest.raises(ValueError, match="a piece of 101 bytes does not fit a ring of 100 bytes"):
        use(ring, given)
    use(ring, source(100, 1))
    other = source(50, 2)
    with (
        ring.visit(other, [0]) as take,
        pytest.raises(RuntimeError, match="inside another one"),
        ring.visit(other, [0]),
    ):
        take(0)
    with pytest.raises(LookupError, match="was not required"), ring.visit(other, [1]) as take:
        take(0)
    use(ring, other)


def test_a_ring_ends_with_its_last_user() -> None:
    ring = ring_of(CPU, 12345)
    assert ring_of(CPU, 12345) is ring
    assert ring in rings()
    del ring
    gc.collect()
    assert all(each.nbytes != 12345 for each in rings())


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU"))]
)
def test_saved_tensors_come_back_and_parked_ones_carry_gradients(device: str) -> None:
    tensors = [torch.randn(33, 65, device=device, requires_grad=True) for _ in range(4)]
    saved = [SavedOnHost(tensor.detach()) for tensor in tensors]
    for tensor, each in reversed(list(zip(tensors, saved, strict=True))):
        assert torch.equal(each.back(), tensor)
        assert torch.equal(each.back(), tensor)
    twice = HostOffloaded(tensors[0] * 3, uses=2)
    for _ in range(4):  # two uses forward, two when both are recomputed
        assert torch.equal(twice.values(twice.placeholder), tensors[0] * 3)
    parked = [HostOffloaded(tensor * 2) for tensor in tensors]
    for _ in range(2):  # forward, and again when it is recomputed
        values = [each.values(each.placeholder) for each in parked]
        for value, tensor in zip(values, tensors, strict=True):
            assert torch.equal(value, tensor * 2)
    torch.stack([value.square().sum() for value in values]).sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, 8 * tensor.detach())
