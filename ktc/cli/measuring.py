"""`ktc doctor --measure`: this machine's rates, measured and written for the plans of later commands.

In: the file to write. Out: progress on stderr, a table of the rates, and the file. Refused: a file that cannot be
written (U003), and the refusals of the build of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ktc.cli.amounts import count
from ktc.cli.bars import calls_bar
from ktc.cli.session import Session
from ktc.foundation.files import refusing, write_file

if TYPE_CHECKING:
    from rich.table import Table

    from ktc.foundation.rates import Figure, Rates


def measure(session: Session, output: Path | None) -> None:
    """Measure this machine and write its file, by default the one that plans are made from."""
    session.require_versions()
    from ktc.foundation import host
    from ktc.foundation.host_writing import host_text
    from ktc.foundation.measured_host import measured_path
    from ktc.tools.measure import run

    path = output or measured_path()
    with calls_bar(session) as progress:
        measured = run.measure(host.detect(probe_gpu=True), progress)
    with refusing(path):
        write_file(path, host_text(measured.host, measured.measurement))
    rates = measured.host.rates
    session.show(rates_table(rates))
    times = f"{measured.seconds:.1f} s, beside {measured.build_seconds:.1f} s for kernels, which are cached"
    session.show(f"measured in {times}; wrote {path}")
    session.diagnose(measured.warnings)
    session.result({
        "path": path, "rates": asdict(rates), "build_seconds": measured.build_seconds, "seconds": measured.seconds,
    })  # fmt: skip
    session.next("ktc", "doctor")


def rates_table(rates: Rates) -> Table:
    """Return one row per figure: its value, and its spread where it was measured."""
    from ktc.cli.tables import plain_table

    table = plain_table("rate", "value", "spread")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value, figure in _rows(rates):
        table.add_row(name, value, f"{figure.spread:.0%}")
    return table


def _rows(rates: Rates) -> Iterator[tuple[str, str, Figure]]:
    cpu = rates.cpu
    for name, figures in cpu.products.items():
        for threads, figure in figures.items():
            yield f"CPU products, {name}, {count(threads, 'thread')}", f"{figure.median / 1e9:,.0f} GFLOP/s", figure
    for threads, figure in cpu.bandwidth.items():
        yield f"CPU memory, {count(threads, 'thread')}", *_gbps(figure)
    yield "CPU memory, one NUMA node", *_gbps(cpu.node_bandwidth)
    yield "PyTorch operator", *_us(cpu.operator)
    yield "native call", *_us(cpu.call)
    for number, gpu in enumerate(rates.gpus):
        name = f"cuda:{number}"
        for dtype, figure in gpu.products.items():
            yield f"{name} products, {dtype}", f"{figure.median / 1e12:,.1f} TFLOP/s", figure
        yield f"{name} memory", *_gbps(gpu.bandwidth)
        yield f"{name} bus", *_gbps(gpu.bus)
        yield f"{name} bus beside the CPU", *_gbps(gpu.bus_beside_cpu)
        yield f"CPU memory beside the bus of {name}", *_gbps(gpu.cpu_beside_bus)
        yield f"{name} PyTorch operator of a module", *_us(gpu.operator)
        yield f"{name} launch", *_us(gpu.launch)
        yield f"{name} node of a graph", *_us(gpu.graph_node)
        yield f"{name} host node", *_us(gpu.host_node)
    if rates.buses is not None:
        yield "all buses", *_gbps(rates.buses)
    if rates.peer is not None:
        yield "between GPUs", *_gbps(rates.peer)
    yield "disk", *_gbps(rates.disk)


def _gbps(figure: Figure) -> tuple[str, Figure]:
    return f"{figure.median / 1e9:,.1f} GB/s", figure


def _us(figure: Figure) -> tuple[str, Figure]:
    return f"{figure.median * 1e6:,.1f} us", figure
