"""Rates in the units of a host file: read beside those that are usual of the machine, and written.

A figure is a number, or a table of its `median` and `spread`. Figures by threads are a figure of all cores, or a table
of them by number of threads. A rate that a file leaves out is the usual one, scaled by a related rate that it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from ktc.foundation.assumed_rates import assumed_gpu, assumed_links, assumed_rates
from ktc.foundation.environment import MOST_THREADS
from ktc.foundation.formats import FORMATS
from ktc.foundation.host import Host
from ktc.foundation.rates import CpuRates, Figure, GpuRates, Origin, Rates
from ktc.foundation.toml_entries import Entries


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a key: the SI value of 1, and the largest number that a machine can have."""

    name: str
    si: float
    most: float


GBPS: Final = Unit("GB/s", 1e9, 1e6)
GFLOPS: Final = Unit("GFLOP/s", 1e9, 1e8)
TFLOPS: Final = Unit("TFLOP/s", 1e12, 1e6)
MICROSECONDS: Final = Unit("us", 1e-6, 1e8)
BYTES: Final = Unit("MB", 1e6, 1e6)
_LEAST: Final = 1e-6  # of every unit
_MOST_SPREAD: Final = 1e6
_BY_THREADS: Final[Mapping[str, str]] = {"bandwidth_gbps": "bandwidth"}
_CPU: Final[Mapping[str, tuple[str, Unit]]] = {
    "node_bandwidth_gbps": ("node_bandwidth", GBPS),
    "attention_gflops": ("attention", GFLOPS),
    "latent_attention_gflops": ("latent_attention", GFLOPS),
    "operator_us": ("operator", MICROSECONDS),
    "call_us": ("call", MICROSECONDS),
}
_GPU: Final[Mapping[str, tuple[str, Unit]]] = {
    "grouped_tflops": ("grouped", TFLOPS),
    "attention_tflops": ("attention", TFLOPS),
    "latent_attention_tflops": ("latent_attention", TFLOPS),
    "bandwidth_gbps": ("bandwidth", GBPS),
    "bus_gbps": ("bus", GBPS),
    "bus_beside_cpu_gbps": ("bus_beside_cpu", GBPS),
    "cpu_beside_bus_gbps": ("cpu_beside_bus", GBPS),
    "operator_us": ("operator", MICROSECONDS),
    "launch_us": ("launch", MICROSECONDS),
    "graph_node_us": ("graph_node", MICROSECONDS),
    "host_node_us": ("host_node", MICROSECONDS),
}
_LINKS: Final[Mapping[str, tuple[str, Unit]]] = {"buses_gbps": ("buses", GBPS), "peer_gbps": ("peer", GBPS)}
_CPU_PRODUCTS, _GPU_PRODUCTS, _CONTEXT = "products_gflops", "products_tflops", "context_mb"
_GPU_DTYPES: Final = ("bf16", "fp32")
CPU_KEYS: Final = (_CPU_PRODUCTS, *_BY_THREADS, *_CPU)
GPU_KEYS: Final = (_GPU_PRODUCTS, *_GPU, _CONTEXT)
TABLES: Final = ("disk", "links")


def is_described(root: Entries) -> bool:
    """Return whether the file has rates."""
    tables = (root.table.get("cpu"), *(table.table for table in _gpu_tables(root)))
    keys = {*CPU_KEYS, *GPU_KEYS}
    of_devices = any(keys & cast("dict[str, object]", table).keys() for table in tables if isinstance(table, dict))
    return of_devices or any(table in root for table in TABLES)


def _gpu_tables(root: Entries) -> list[Entries]:
    """Return the tables of GPUs, none where they are not tables: that is a fault of the facts."""
    value = root.table.get("gpu", [])
    is_array = isinstance(value, list) and all(isinstance(table, dict) for table in cast("list[object]", value))
    return root.tables("gpu") if is_array else []


class RatesReader:
    """Reads the rates of a file, whose facts are those of `host`."""

    def __init__(self, root: Entries, host: Host) -> None:
        self._root, self._host = root, host

    def read(self, origin: Origin) -> Rates:
        """Return all rates. Faults are added to the file."""
        host = self._host
        usual = assumed_rates(host.isas[0], host.cores, host.numa, [gpu.name for gpu in host.gpus], host.processor)
        cpu = self._cpu(self._root.inside("cpu"), usual.cpu)
        read = cpu.bandwidth[max(cpu.bandwidth)]
        gpus = tuple(
            self._gpu(table, assumed_gpu(gpu.name, read.median))
            for table, gpu in zip(_gpu_tables(self._root), host.gpus, strict=False)
        )
        links = dict(zip(("buses", "peer"), assumed_links(gpus, host.numa), strict=True))
        links |= _figures(self._table("links", *_LINKS), _LINKS)
        disk = _figure(self._table("disk", "read_gbps"), "read_gbps", GBPS) or usual.disk
        return Rates(cpu, gpus, disk, links["buses"], links["peer"], origin)

    def _table(self, name: str, *keys: str) -> Entries:
        entries = self._root.inside(name)
        entries.refuse_unknown(*keys)
        return entries

    def _cpu(self, entries: Entries, usual: CpuRates) -> CpuRates:
        given = _by_threads(entries, "bandwidth_gbps", GBPS, self._host.cores)
        bandwidth = _completed(given, usual.bandwidth)
        node = Figure(bandwidth[max(bandwidth)].median / self._host.numa)
        rates = replace(
            usual, products=self._products(entries, usual.products), bandwidth=bandwidth, node_bandwidth=node
        )
        return replace(rates, **_figures(entries, _CPU))

    def _products(self, entries: Entries, usual: Mapping[str, Mapping[int, Figure]]) -> dict[str, Mapping[int, Figure]]:
        """Return those of every format. The ones left out keep their usual ratio to bf16."""
        if _CPU_PRODUCTS not in entries:
            return dict(usual)
        inside = entries.inside(_CPU_PRODUCTS)
        inside.refuse_unknown(*FORMATS)
        given = {name: _by_threads(inside, name, GFLOPS, self._host.cores) for name in FORMATS}
        faster = _ratio(given["bf16"], usual["bf16"])
        return {
            name: _completed(given.get(name), figures) if given.get(name) else _scaled(figures, faster)
            for name, figures in usual.items()
        }

    def _gpu(self, entries: Entries, usual: GpuRates) -> GpuRates:
        given = _figures(entries, _GPU)
        products = dict(usual.products)
        if _GPU_PRODUCTS in entries:
            inside = entries.inside(_GPU_PRODUCTS)
            inside.refuse_unknown(*_GPU_DTYPES)
            read = {name: figure for name in _GPU_DTYPES if (figure := _figure(inside, name, TFLOPS))}
            faster = read["bf16"].median / products["bf16"].median if "bf16" in read else 1.0
            products = {name: read.get(name) or _times(figure, faster) for name, figure in products.items()}
        if "bus" in given and "bus_beside_cpu" not in given:
            given["bus_beside_cpu"] = _times(usual.bus_beside_cpu, given["bus"].median / usual.bus.median)
        if "launch" in given and "operator" not in given:
            given["operator"] = _times(usual.operator, given["launch"].median / usual.launch.median)
        context = _figure(entries, _CONTEXT, BYTES)
        faster = products["bf16"].median / usual.products["bf16"].median
        kept = {name: _times(getattr(usual, name), faster) for name in ("grouped", "attention", "latent_attention")}
        rates = replace(usual, **kept, products=products, context=round(context.median) if context else usual.context)
        return replace(rates, **given)


def _figures(entries: Entries, keys: Mapping[str, tuple[str, Unit]]) -> dict[str, Figure]:
    """Return the figures that the table has, by the names of their fields."""
    read = {name: _figure(entries, key, unit) for key, (name, unit) in keys.items()}
    return {name: figure for name, figure in read.items() if figure is not None}


def _figure(entries: Entries, key: str, unit: Unit) -> Figure | None:
    """Return the figure in SI units, None where it is missing or refused."""
    value = entries.table.get(key)
    if isinstance(value, dict):
        inside = entries.inside(key)
        inside.refuse_unknown("median", "spread")
        median = inside.value("median", lambda number: _number(number, _LEAST, unit.most), _what(unit))
        spread = inside.value("spread", lambda number: _number(number, 0.0, _MOST_SPREAD), "a share, such as 0.05")
        if "median" not in inside:
            entries.refuse(key, f"`{key}` must have a `median`")
        return None if median is None else Figure(median * unit.si, spread or 0.0)
    number = entries.value(key, lambda number: _number(number, _LEAST, unit.most), _what(unit))
    return None if number is None else Figure(number * unit.si)


def _what(unit: Unit) -> str:
    return f"a number of {unit.name} from {_LEAST:g} to {unit.most:g}"


def _number(value: object, least: float, most: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        return None
    return float(value)


def _by_threads(entries: Entries, key: str, unit: Unit, cores: int) -> dict[int, Figure]:
    """Return the figures by threads, ascending; one figure is that of all cores."""
    value = entries.table.get(key)
    keys = cast("dict[str, object]", value).keys() if isinstance(value, dict) else {"median"}
    if {"median", "spread"} & keys:
        figure = _figure(entries, key, unit)
        return {} if figure is None else {cores: figure}
    inside, read = entries.inside(key), dict[int, Figure]()
    for threads in inside.table:
        if not (threads.isdecimal() and threads.isascii() and len(threads) <= 9 and 0 < int(threads) <= MOST_THREADS):
            inside.refuse(threads, f"`{threads:.100}` must be a number of threads from 1 to {MOST_THREADS}")
        elif figure := _figure(inside, threads, unit):
            read[int(threads)] = figure
    return dict(sorted(read.items()))


def _completed(given: Mapping[int, Figure] | None, usual: Mapping[int, Figure]) -> dict[int, Figure]:
    """Return the given figures, and the usual ones of other numbers of threads at their ratio."""
    if not given:
        return dict(usual)
    scaled = {n: figure for n, figure in _scaled(usual, _ratio(given, usual)).items() if n < max(given)}
    return dict(sorted({**scaled, **given}.items()))


def _ratio(given: Mapping[int, Figure] | None, usual: Mapping[int, Figure]) -> float:
    """Return the given figure of most threads over the usual one of as many."""
    if not given:
        return 1.0
    most = max(given)
    nearest = min(usual, key=lambda threads: abs(threads - most))
    return given[most].median / (usual[nearest].median * most / nearest)


def _scaled(figures: Mapping[int, Figure], factor: float) -> dict[int, Figure]:
    return {threads: _times(figure, factor) for threads, figure in figures.items()}


def _times(figure: Figure, factor: float) -> Figure:
    return Figure(figure.median * factor)


# Writing


def cpu_table(rates: CpuRates) -> dict[str, object]:
    """Return the keys and values of `[cpu]`."""
    return {
        **{key: _in_unit(getattr(rates, name), unit) for key, (name, unit) in _CPU.items()},
        "bandwidth_gbps": _all_in_unit(rates.bandwidth, GBPS),
        _CPU_PRODUCTS: {name: _all_in_unit(figures, GFLOPS) for name, figures in rates.products.items()},
    }


def gpu_table(rates: GpuRates) -> dict[str, object]:
    """Return the keys and values of a `[[gpu]]`."""
    return {
        **{key: _in_unit(getattr(rates, name), unit) for key, (name, unit) in _GPU.items()},
        _CONTEXT: _rounded(rates.context / BYTES.si),
        _GPU_PRODUCTS: {name: _in_unit(figure, TFLOPS) for name, figure in rates.products.items()},
    }


def links_table(rates: Rates) -> dict[str, object]:
    """Return the keys and values of `[links]`, empty with less than two GPUs."""
    figures = {key: (getattr(rates, name), unit) for key, (name, unit) in _LINKS.items()}
    return {key: _in_unit(figure, unit) for key, (figure, unit) in figures.items() if figure is not None}


def disk_table(rates: Rates) -> dict[str, object]:
    """Return the keys and values of `[disk]`."""
    return {"read_gbps": _in_unit(rates.disk, GBPS)}


def _all_in_unit(figures: Mapping[int, Figure], unit: Unit) -> dict[str, object]:
    return {str(threads): _in_unit(figure, unit) for threads, figure in figures.items()}


def _in_unit(figure: Figure, unit: Unit) -> dict[str, float]:
    return {"median": _rounded(figure.median / unit.si), "spread": _rounded(figure.spread)}


def _rounded(value: float) -> float:
    """Return the number with four digits."""
    return float(f"{value:.4g}") if math.isfinite(value) else value
