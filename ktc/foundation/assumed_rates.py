"""The usual rates of a processor and its cards, on the safe side: what the planner uses until they are measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ktc.foundation.formats import BLOCKS, FORMATS, WeightFormat
from ktc.foundation.isa import Isa
from ktc.foundation.rates import CpuRates, Figure, GpuRates, Rates

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Processor:
    """FLOP/s of one core in bf16 products of many rows, by instruction set, as a share of `_CORE`; and its memory.

    Bytes/s: of one core alone, of one of many cores, and of a socket.
    """

    speed: float
    core_alone: float
    core_shared: float
    socket: float


# FLOP/s of one core in ktc's own products with many rows, in bf16. amx: V2-Lite's 2,048 tokens at 8.7 to 9.3 TFLOP/s of
# 16 shared cores (docs/benchmarks.md, "With AMX"). Others are of a processor between a Xeon whose cores are shared (80
# GFLOP/s with avx512_bf16 there, 60 to 80 with avx2 in "Frozen linear layers") and a quiet Zen 4 (`ktc doctor
# --measure`: 219, 111 and 101 GFLOP/s with avx512_bf16, avx512 and avx2).
_CORE: Final[Mapping[Isa, float]] = {
    "amx": 450e9, "avx512_bf16": 110e9, "avx512": 60e9, "avx2": 50e9, "scalar": 1e9,
}  # fmt: skip
# fp32 products of PyTorch, by a core: 97 GFLOP/s of a Zen 4, measured, and less of cores that others share.
_CORE_FP32: Final[Mapping[Isa, float]] = {
    "amx": 60e9, "avx512_bf16": 60e9, "avx512": 60e9, "avx2": 45e9, "scalar": 5e9,
}  # fmt: skip

# The first pattern that a processor's name has. Bandwidths are three quarters of the data sheet's, or less where
# measured: a core of a Zen 4 reads 31 to 41 GB/s alone, one of a Xeon with AMX 12 to 14, 16 of the latter 87 to 120.
_PROCESSORS: Final[Mapping[str, _Processor]] = {
    r"EPYC 9": _Processor(1.8, 25e9, 9e9, 340e9),  # 12 channels of DDR5
    r"EPYC 7": _Processor(1.0, 15e9, 5e9, 140e9),  # 8 channels of DDR4
    r"EPYC": _Processor(1.6, 25e9, 5e9, 140e9),  # a virtual machine that hides the model
    r"Xeon": _Processor(0.75, 11e9, 5.4e9, 200e9),  # 8 channels of DDR5, shared
    r"Ryzen.*\b\d{4}(U|H|HS|HX)\b|Ryzen AI": _Processor(1.0, 18e9, 8e9, 40e9),  # laptops
    r"Core.*\d(U|H|P|HX|V)\b": _Processor(0.7, 15e9, 6e9, 40e9),
    r"Threadripper": _Processor(1.5, 20e9, 9e9, 130e9),
    r"Ryzen": _Processor(1.5, 28e9, 12e9, 60e9),  # 2 channels of DDR5, 80 GB/s on paper
    r"Core": _Processor(1.0, 20e9, 8e9, 55e9),
    r"": _Processor(0.6, 8e9, 5e9, 60e9),
}

# Products of many rows in other formats, as a multiple of bf16's: of a Zen 4 by `ktc doctor --measure`, rounded down,
# and of AMX from docs/benchmarks.md ("int8 beside bf16", and int4 in "Beside kt-kernel"). Codes become bf16 once for
# all rows of an expert; without bf16 products, blocks are multiplied as words instead.
_INT8: Final[Mapping[Isa, float]] = {"amx": 1.2, "avx512_bf16": 1.8, "avx512": 1.35, "avx2": 1.3, "scalar": 0.5}
_BLOCKS: Final[Mapping[Isa, float]] = {"amx": 0.7, "avx512_bf16": 0.87, "avx512": 1.15, "avx2": 1.15, "scalar": 0.5}
_CODES: Final[Mapping[Isa, float]] = {"amx": 0.7, "avx512_bf16": 0.9, "avx512": 0.9, "avx2": 0.9, "scalar": 0.5}


@dataclass(frozen=True, slots=True)
class _Card:
    """FLOP/s in bf16 and fp32, bytes/s of memory and of the bus."""

    bf16: float
    fp32: float
    bandwidth: float
    bus: float


# The first pattern that a card's name has. Rates are those that programs reach, not those of the data sheet. Buses are
# measured for H100 and H200 (50 to 55 GB/s, PCIe 5 x16) and 25 GB/s for PCIe 4 x16; other figures are 0.65 to 0.85 of
# data sheets, and fp32 is without TF32.
_CARDS: Final[Mapping[str, _Card]] = {
    r"B[23]00": _Card(1300e12, 60e12, 6.0e12, 50e9),
    r"H200\b": _Card(600e12, 45e12, 4.0e12, 50e9),
    r"H100\b": _Card(600e12, 45e12, 2.5e12, 50e9),
    r"A100\b": _Card(230e12, 15e12, 1.4e12, 24e9),
    r"L40": _Card(150e12, 45e12, 0.7e12, 24e9),
    r"RTX 5090": _Card(190e12, 70e12, 1.5e12, 48e9),
    r"RTX 5080": _Card(95e12, 40e12, 0.8e12, 48e9),
    r"RTX 4090": _Card(150e12, 55e12, 0.85e12, 24e9),
    r"RTX 4080": _Card(85e12, 35e12, 0.6e12, 24e9),
    r"RTX 3090": _Card(60e12, 25e12, 0.8e12, 24e9),
    r"RTX 3060": _Card(22e12, 9e12, 0.3e12, 11e9),
    r"": _Card(40e12, 10e12, 0.4e12, 11e9),
}
# Shares of a card's bf16 products, and of a processor's fp32 products, that grouped products and attention reach.
_GROUPED, _ATTENTION, _LATENT_ATTENTION = 0.5, 0.4, 0.2
_CPU_ATTENTION, _CPU_LATENT_ATTENTION = 0.4, 0.12
_PEER: Final[Mapping[str, float]] = {r"B[23]00|H[12]00|A100": 150e9, r"": 20e9}  # with and without NVLink
_SOCKET_BUSES: Final = 150e9  # bytes/s of the buses of one socket together: four of an H100's host, measured


def assumed_rates(isa: Isa, cores: int, numa: int, gpus: Sequence[str], processor: str = "") -> Rates:
    """Return the usual rates of a machine with `cores` cores, the GPUs of these names and a processor of this name."""
    cpu = _cpu(isa, cores, numa, _first(_PROCESSORS, processor))
    cards = tuple(assumed_gpu(name, cpu.bandwidth[cores].median) for name in gpus)
    buses, peer = assumed_links(cards, numa, gpus)
    return Rates(cpu, cards, Figure(1e9), buses, peer)


def assumed_gpu(name: str, cpu_bandwidth: float) -> GpuRates:
    """Return the usual rates of a card, beside a processor that reads its memory at `cpu_bandwidth` bytes/s.

    Both bus and processor lose at most 7 % beside one another (an H100 and 15 of 16 cores).
    """
    card = _first(_CARDS, name)
    return GpuRates(
        products={"bf16": Figure(card.bf16), "fp32": Figure(card.fp32)},
        grouped=Figure(_GROUPED * card.bf16),
        attention=Figure(_ATTENTION * card.bf16),
        latent_attention=Figure(_LATENT_ATTENTION * card.bf16),
        bandwidth=Figure(card.bandwidth),
        bus=Figure(card.bus),
        bus_beside_cpu=Figure(0.9 * card.bus),
        cpu_beside_bus=Figure(0.9 * cpu_bandwidth),
        operator=Figure(13e-6),
        launch=Figure(8e-6),
        graph_node=Figure(1.2e-6),
        host_node=Figure(50e-6),
        context=600 << 20,
    )


def assumed_links(
    gpus: Sequence[GpuRates], numa: int, names: Sequence[str] = ()
) -> tuple[Figure, Figure] | tuple[None, None]:
    """Return bytes/s of all buses at once and between two cards; None for less than two cards."""
    if len(gpus) < 2:
        return None, None
    buses = min(sum(gpu.bus.median for gpu in gpus), numa * _SOCKET_BUSES)
    return Figure(buses), Figure(min((_first(_PEER, name) for name in names), default=_PEER[""]))


def _cpu(isa: Isa, cores: int, numa: int, processor: _Processor) -> CpuRates:
    counts = sorted({1, cores - 1, cores} - {0})
    shared = min(max(processor.core_alone, cores * processor.core_shared), numa * processor.socket)
    bandwidth = {n: Figure(min(n * processor.core_alone, shared)) for n in counts}
    core = _CORE[isa] * (processor.speed if isa != "amx" else 1.0)
    speeds = {name: core * _of_bf16(name, isa) for name in FORMATS if name != "fp32"} | {"fp32": _CORE_FP32[isa]}
    products = {name: {n: Figure(n * speed) for n in counts} for name, speed in speeds.items()}
    node = Figure(bandwidth[cores].median / numa)
    all_cores = products["fp32"][cores].median
    return CpuRates(
        products,
        bandwidth,
        node,
        attention=Figure(_CPU_ATTENTION * all_cores),
        latent_attention=Figure(_CPU_LATENT_ATTENTION * all_cores),
        operator=Figure(4e-6),
        call=Figure(3e-6),
    )


def _of_bf16(name: WeightFormat, isa: Isa) -> float:
    if name == "int8":
        return _INT8[isa]
    if not FORMATS[name].coded:
        return 1.0 if name == "bf16" else 0.9
    return (_BLOCKS if name in BLOCKS else _CODES)[isa]


def _first(rows: Mapping[str, T], name: str) -> T:
    return next(row for pattern, row in rows.items() if not pattern or re.search(rf"\b(?:{pattern})", name))
