"""`ktc doctor --measure`: every figure is measured, a failing part is the usual one, and a busy machine is reported."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_layers import ISAS, built, spec_of

from ktc.cli import app as cli
from ktc.foundation import host, host_file, measured_host
from ktc.foundation.host import Gpu
from ktc.foundation.rates import Figure
from ktc.model.kernels.form import ExpertsSizes
from ktc.tools.measure import attention, bus, cpu, disk, figures, gpu, limits, links, load, run

CPU = torch.device("cpu")
SPEC = spec_of(ISAS[0])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small things for a short time, with a kernel that other quick tests build too."""
    for module in (attention, cpu, gpu, links, disk):
        monkeypatch.setattr(module, "_BUDGET", 0.0)
    for name, small in (("_SIZES", ExpertsSizes(4, 64, 64, 2)), ("_FORMATS", ("bf16",)), ("_CALLS", 3), ("_SIDE", 32)):
        monkeypatch.setattr(cpu, name, small)
    for name, size in (("_SIDE", {"bf16": 16, "fp32": 16}), ("_COPIED", 1000), ("_LAUNCHES", 3)):
        monkeypatch.setattr(gpu, name, size)
    monkeypatch.setattr(gpu.bandwidth, "__defaults__", (1000,))
    monkeypatch.setattr(links.beside, "__defaults__", (0.01,))
    monkeypatch.setattr(links.peer, "__defaults__", (1000,))
    monkeypatch.setattr(disk.disk, "__defaults__", (10_000,))
    monkeypatch.setattr(run, "_COPIED", 1000)
    monkeypatch.setattr(attention, "_HEADS", 2)
    monkeypatch.setattr(attention.attention, "__defaults__", (8, 1))
    monkeypatch.setattr(attention.grouped, "__defaults__", (4, (2, 16, 16)))
    monkeypatch.setattr(limits, "_MIN_READ", 1 << 20)
    monkeypatch.setattr(limits, "_last_level_cache", lambda: 0)
    monkeypatch.setattr(load, "load", lambda: 0.0)
    monkeypatch.setattr(run.build, "build", lambda source, host: built((SPEC,)))
    monkeypatch.setattr(cpu, "_spec", lambda sizes, isa, name: SPEC)


def test_the_figure_of_measurements_is_their_median_and_spread() -> None:
    assert figures.figure([3.0]) == Figure(3.0)
    assert figures.figure([10.0, 30.0, 20.0, 40.0, 50.0]) == Figure(30.0, 20 / 30)


def test_measurements_warm_up_and_are_repeated_for_a_while() -> None:
    calls = iter([100.0, *[2.0] * 40])
    assert figures.repeated(lambda: next(calls), 0.0) == Figure(2.0)
    assert len([*calls]) == 37
    calls = iter([100.0, *[2.0] * 40])
    assert figures.repeated(lambda: next(calls), 10.0) == Figure(2.0)
    assert len([*calls]) == 15


def test_bus_and_processor_work_at_once() -> None:
    class Reads:
        calls = 0

        def read(self) -> float:
            self.calls += 1
            return 7.0

    class Copies:
        size, calls = 1000, 0

        def copy(self) -> float:
            self.calls += 1
            while self.calls > 1 and reads.calls < 3:  # the first warms up, alone
                time.sleep(0.001)
            return 0.5

    reads: Any = Reads()
    copies: Any = Copies()
    of_bus, of_cpu = links.beside(copies, reads, 0.0)
    assert of_bus == Figure(2000.0) and of_cpu == Figure(7.0) and reads.calls > 2


def test_a_failing_read_beside_the_bus_ends_the_measurement() -> None:
    def fail() -> float:
        raise RuntimeError("no memory")

    reads: Any = SimpleNamespace(read=fail)
    with pytest.raises(RuntimeError, match="no memory"):
        links.beside(bus.Bus(1000, CPU), reads, 0.0)


def test_threads_read_on_their_cpus_and_share_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "_MIN_READ", 1 << 20)
    monkeypatch.setattr(limits, "_last_level_cache", lambda: 0)
    library = limits.build_library(ISAS[0], tmp_path)
    first = min(host.numa_nodes()[0].cpus) if host.numa_nodes() else 0
    both = limits.Limits(library, 2, cpus=(first,))
    one = limits.Limits(library, 1, like=both, wall=True)
    assert both.read_bytes == one.read_bytes == 1 << 20
    assert both.read() > 0 and one.read() > 0


def test_the_memory_of_cuda_is_what_another_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([(100, 1000), (200, 1000), (60, 1000), (150, 1000)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: next(free))
    monkeypatch.setattr(gpu, "_OTHER", "import sys; print(10, 20, flush=True); sys.stdin.read()")
    assert gpu.contexts(2) == (30, 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (100, 1000))
    monkeypatch.setattr(gpu, "_OTHER", "")
    with pytest.raises(RuntimeError, match="is unknown"):
        gpu.contexts(2)


def test_a_whole_machine_is_measured(quick: None) -> None:
    here = replace(host.detect(), isas=(SPEC.isa,))
    parts: list[tuple[str, int, int]] = []
    measured = run.measure(here, lambda *part: parts.append(part))
    rates = measured.host.rates
    assert rates.origin == "measured" and rates.when == measured.measurement.when
    assert set(rates.cpu.products) == {"bf16", "fp32"}
    assert set(rates.cpu.bandwidth) == set(rates.cpu.products["bf16"]) == set(cpu.thread_counts(here))
    assert not [warning for warning in measured.warnings if warning.code != "H208"]
    assert parts[0][0] == "building kernels"
    assert parts[-1] == ("disk", parts[-1][2] - 1, parts[-1][2])
    assert min(measured.seconds, measured.build_seconds) > 0


def test_gpus_and_their_links_are_measured(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "contexts", lambda count: (5,) * count)
    monkeypatch.setattr(gpu, "_of_graph", lambda device, node, nodes: Figure(1e-6))
    usual = replace(host.detect(), gpus=(Gpu("NVIDIA H100", 1), Gpu("NVIDIA H100", 1))).rates
    reads: Any = SimpleNamespace(read=lambda: 7.0)
    steps = run.Steps(lambda *part: None, 20)
    rates = run._gpus(usual, [CPU, CPU], reads, steps)
    assert steps.failures == {} and steps.done == 2 * run._OF_GPU + run._OF_GPUS + run._OF_SEVERAL
    for one, assumed in zip(rates.gpus, usual.gpus, strict=True):
        assert one.context == 5 and one.cpu_beside_bus == Figure(7.0) and one.graph_node == Figure(1e-6)
        pairs = [(one.bandwidth, assumed.bandwidth), (one.bus, assumed.bus), (one.launch, assumed.launch)]
        assert all(mine != theirs for mine, theirs in [*pairs, (one.products["bf16"], assumed.products["bf16"])])
    assert rates.buses != usual.buses and rates.peer != usual.peer


def test_a_part_that_fails_is_the_usual_figure_with_a_warning(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Figure:
        raise RuntimeError("CUDA error 801\nand more")

    for name in ("contexts", "_of_graph", "products"):
        monkeypatch.setattr(gpu, name, fail)
    usual = replace(host.detect(), gpus=(Gpu("NVIDIA H100", 1),)).rates
    steps = run.Steps(lambda *part: None, 20)
    reads: Any = SimpleNamespace(read=lambda: 7.0)
    (one,) = run._gpus(usual, [CPU], reads, steps).gpus
    assert (one.context, one.graph_node, one.products) == (
        *(usual.gpus[0].context, usual.gpus[0].graph_node, usual.gpus[0].products),
    )
    (warning,) = run._failed(steps.failures)
    assert warning.code == "H209" and "a host node of cpu (CUDA error 801)" in warning.message
    assert not [*run._failed({})]


@pytest.mark.parametrize(("used", "spread", "busy"), [(0.1, 0.1, False), (0.3, 0.0, True), (0.0, 0.4, True)])
def test_a_busy_machine_is_reported(used: float, spread: float, busy: bool) -> None:
    rates = host.detect().rates
    by_threads = {1: Figure(1.0, spread)}
    rates = replace(rates, cpu=replace(rates.cpu, bandwidth=by_threads, products={"bf16": by_threads}))
    assert [warning.code for warning in run._busy(used, rates)] == ["H208"] * busy


def test_doctor_measures_writes_and_then_knows(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert cli.main(["doctor", "--measure", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    path = measured_host.measured_path()
    assert facts["path"] == str(path) and facts["rates"]["origin"] == "measured"
    assert {"build_seconds", "seconds", "diagnostics"} <= facts.keys() | {"diagnostics"}
    assert host_file.read_file(path).measurement is not None
    assert measured_host.this_host().rates.origin == "measured"
    for text, state in (("busy = true", "while the machine was busy"), ('ktc = "0"', "stale")):
        key = text.partition(" ")[0]
        lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
        path.write_text("\n".join(lines).replace("[measured]", f"[measured]\n{text}"))
        cli.main(["doctor"])
        assert state in " ".join(capfd.readouterr().out.split())


def test_doctor_measures_into_another_file(quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "mine.toml"
    assert cli.main(["doctor", "--measure", "-o", str(path)]) == 0
    assert host_file.read_file(path).host.rates.origin == "measured"
    assert cli.main(["doctor", "-o", str(path)]) == 2
    assert "U001" in capfd.readouterr().err
