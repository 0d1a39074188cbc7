"""The usual rates of a processor and its cards, on the safe side: what the planner uses until they are measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ktc.foundation.isa import Isa
from ktc.foundation.rates import CpuRates, Figure, GpuRates, Rates

# FLOP/s of one core in ktc's own products with many rows (docs/kernels.md), by instruction set; then by weight format.
_CORE: Final[Mapping[Isa, float]] = {
    "amx": 170e9, "avx512_bf16": 90e9, "avx512": 55e9, "avx2": 35e9, "scalar": 1e9,
}  # fmt: skip
_CORE_BANDWIDTH: Final = 6e9  # bytes/s
_SOCKET_BANDWIDTH: Final = 80e9


@dataclass(frozen=True, slots=True)
class _Card:
    """FLOP/s in bf16, bytes/s of memory and of the bus."""

    bf16: float
    bandwidth: float
    bus: float


# The first pattern that a card's name has. Rates are those that programs reach, not those of the data sheet.
_CARDS: Final[Mapping[str, _Card]] = {
    "H200": _Card(600e12, 4.0e12, 50e9),
    "H100": _Card(600e12, 2.5e12, 50e9),
    "A100": _Card(230e12, 1.4e12, 24e9),
    "5090": _Card(190e12, 1.5e12, 48e9),
    "4090": _Card(150e12, 0.85e12, 24e9),
    "3090": _Card(60e12, 0.8e12, 24e9),
    "3060": _Card(22e12, 0.3e12, 11e9),
    "": _Card(40e12, 0.4e12, 11e9),
}


def assumed_rates(isa: Isa, cores: int, numa: int, gpus: Sequence[str]) -> Rates:
    """Return the usual rates of a machine with `cores` cores and the GPUs of these names."""
    counts = sorted({1, cores - 1, cores} - {0})
    bandwidth = {n: Figure(min(n * _CORE_BANDWIDTH, numa * _SOCKET_BANDWIDTH)) for n in counts}
    products = {name: {n: Figure(n * _CORE[isa]) for n in counts} for name in ("bf16", "fp32")}
    cpu = CpuRates(
        products, bandwidth, Figure(bandwidth[cores].median / numa), operator=Figure(4e-6), call=Figure(3e-6)
    )
    cards = tuple(_rates_of(_card(name), bandwidth[cores].median) for name in gpus)
    buses = Figure(min(sum(card.bus.median for card in cards), numa * _SOCKET_BANDWIDTH)) if len(cards) > 1 else None
    return Rates(cpu, cards, Figure(1e9), buses, Figure(20e9) if len(cards) > 1 else None)


def _card(name: str) -> _Card:
    return next(card for pattern, card in _CARDS.items() if re.search(rf"\b{pattern}", name))


def _rates_of(card: _Card, cpu: float) -> GpuRates:
    return GpuRates(
        products={"bf16": Figure(card.bf16), "fp32": Figure(card.bf16 / 4)},
        bandwidth=Figure(card.bandwidth),
        bus=Figure(card.bus),
        bus_beside_cpu=Figure(0.9 * card.bus),
        cpu_beside_bus=Figure(0.9 * cpu),
        launch=Figure(8e-6),
        graph_node=Figure(2e-6),
        host_node=Figure(50e-6),
        context=600 << 20,
    )
