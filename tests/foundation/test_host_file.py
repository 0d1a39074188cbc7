"""Host files: rates are read in their units, all faults have places, and what is written is read again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ktc.diagnostics import Diagnostic, InputRefused, render
from ktc.foundation import host, host_file, measured_host
from ktc.foundation.host import Gpu, Host
from ktc.foundation.host_file import Measurement, read_file, read_host, read_host_file
from ktc.foundation.host_writing import host_text
from ktc.foundation.rates import Figure
from ktc.foundation.rates_file import CPU_KEYS, GPU_KEYS, TABLES

SERVER = """version = 1
isa = "amx"
cores = 16
[cpu]
name = "Xeon"
bandwidth_gbps = { 1 = 12, 16 = { median = 87, spread = 0.04 } }
products_gflops = { bf16 = 7000, int4 = { 1 = 300, 16 = 4000 } }
call_us = 5
[[gpu]]
name = "NVIDIA H100"
memory = "80GiB"
bus_gbps = 45
products_tflops = { bf16 = 300 }
context_mb = 500
[disk]
read_gbps = 2
"""
HERE = host.detect()
MEASUREMENT = Measurement("2026-11-27", False, "0.1.0")


@pytest.fixture(autouse=True)
def _this_machine_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "detect", lambda: HERE)


def read(folder: Path, text: str) -> Host:
    path = folder / "host.toml"
    path.write_text(text)
    return read_host_file(path)


def faults_of(folder: Path, text: str) -> tuple[Diagnostic, ...]:
    try:
        read(folder, text)
    except InputRefused as error:
        return error.diagnostics
    return ()


def refused(folder: Path, text: str) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        read(folder, text)
    return caught.value


def test_rates_are_read_in_their_units(tmp_path: Path) -> None:
    rates = read(tmp_path, SERVER).rates
    assert rates.origin == "described"
    assert rates.cpu.bandwidth[1] == Figure(12e9) and rates.cpu.bandwidth[16] == Figure(87e9, 0.04)
    assert rates.cpu.products["int4"][16] == Figure(4e12)
    assert rates.cpu.call.median == pytest.approx(5e-6)
    assert rates.gpus[0].products["bf16"] == Figure(300e12) and rates.gpus[0].context == 500_000_000
    assert rates.disk == Figure(2e9)


def test_rates_that_a_file_leaves_out_are_usual_ones_at_the_ratio_of_related_ones(tmp_path: Path) -> None:
    described = read(tmp_path, SERVER)
    rates, usual = described.rates, replace(described, described=None).rates
    faster = 7e12 / usual.cpu.products["bf16"][16].median
    assert rates.cpu.products["bf16"][1].median == pytest.approx(faster * usual.cpu.products["bf16"][1].median)
    assert rates.cpu.products["q4_k"][16].median == pytest.approx(faster * usual.cpu.products["q4_k"][16].median)
    assert rates.cpu.node_bandwidth.median == 87e9 / described.numa
    gpu, usual_gpu = rates.gpus[0], usual.gpus[0]
    assert gpu.products["fp32"].median == pytest.approx(usual_gpu.products["fp32"].median / 2)
    assert gpu.bus_beside_cpu.median == pytest.approx(0.9 * 45e9)
    assert gpu.cpu_beside_bus.median == pytest.approx(0.9 * 87e9)
    assert gpu.launch == usual_gpu.launch
    assert set(rates.cpu.products) == set(usual.cpu.products)


def test_a_file_of_facts_alone_has_the_usual_rates(tmp_path: Path) -> None:
    described = read(tmp_path, 'isa = "avx2"\ncores = 8\n')
    assert described.processor == "" and described.rates.origin == "assumed"
    assert described.rates == replace(described, described=None).rates
    assert read(tmp_path, 'memory = "8GiB"\n').processor == host.cpu_name()


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "-inf", "1e30", '"x"', "true", "[]", "1979-05-27"])
@pytest.mark.parametrize(
    "line",
    [
        "[cpu]\ncall_us = {}",
        "[cpu]\nbandwidth_gbps = {{ 2 = {} }}",
        "[cpu.products_gflops]\nbf16 = {{ median = {} }}",
        '[[gpu]]\nmemory = "8GiB"\nbus_gbps = {}',
        "[links]\npeer_gbps = {}",
        "[disk]\nread_gbps = {}",
    ],
)
def test_impossible_numbers_are_refused_at_their_place(tmp_path: Path, line: str, number: str) -> None:
    text = line.format(number)
    (fault,) = refused(tmp_path, text).diagnostics
    assert fault.code == "H203" and fault.span is not None
    place = text.splitlines()[fault.span.line - 1][fault.span.column - 1 : fault.span.end_column - 1]
    assert place in ("call_us", "2", "median", "bus_gbps", "peer_gbps", "read_gbps")


@pytest.mark.parametrize("text", ["cores = 4\nnuma = 5", 'memory = "9999999999TiB"', 'memory = "0GiB"'])
def test_impossible_machines_are_refused(tmp_path: Path, text: str) -> None:
    (fault,) = refused(tmp_path, text).diagnostics
    assert fault.code == "H203" and fault.span is not None and fault.span.line == text.count("\n") + 1


def test_all_faults_of_rates_come_together(tmp_path: Path) -> None:
    text = (
        "cores = 0\n[cpu]\nbandwith_gbps = 3\nbandwidth_gbps = { 0 = 1, x = 2, 2 = { median = 1, spred = 2 } }\n"
        "products_gflops = { int5 = 3, int8 = { spread = 0.1 } }\n[disk]\nspread = 3\n[links]\nbuses_gbps = {}\n"
        "[measured]\nbusy = 3\n"
    )
    faults = [(fault.code, fault.span.line if fault.span else 0) for fault in refused(tmp_path, text).diagnostics]
    assert sorted(faults) == [
        *(("H202", 3), ("H202", 4), ("H202", 5), ("H202", 7), ("H203", 1)),
        *(("H203", 4), ("H203", 4), ("H203", 5), ("H203", 9), ("H203", 11)),
    ]


@pytest.mark.parametrize("version", ["2", "0", '"1"', "true", "1.5"])
def test_another_version_is_refused_by_itself(tmp_path: Path, version: str) -> None:
    (fault,) = refused(tmp_path, f"cores = 2\nversion = {version}\nunknown = 3\n").diagnostics
    assert fault.code == "H204" and fault.span is not None and fault.span.line == 2


@pytest.mark.parametrize("entry", ["gpu = 3", "gpu = [1]", "cpu = 3", "links = []", "[[measured]]\n", "disk = 'x'"])
def test_entries_that_are_not_tables_are_refused(tmp_path: Path, entry: str) -> None:
    assert {fault.code for fault in refused(tmp_path, f"{entry}\n").diagnostics} == {"H203"}


def test_any_damage_of_a_file_is_a_message(tmp_path: Path) -> None:
    """A changed, moved or lost character gives a machine or faults with places."""
    random.seed(0)
    text = host_text(read(tmp_path, SERVER), MEASUREMENT)
    for _ in range(300):
        at = random.randrange(len(text))
        damaged = text[:at] + random.choice(["", "-", "=", "[", '"', "9" * 30, "\n", ".", text[:50]]) + text[at + 1 :]
        for fault in faults_of(tmp_path, damaged):
            assert fault.span is not None and render([fault])


def test_a_written_file_has_the_same_machine(tmp_path: Path) -> None:
    described = replace(host.detect(), gpus=(Gpu("NVIDIA H100", 80 << 30), Gpu('a "card"', 24 << 30)))
    described = replace(described, described=replace(described.rates, busy=True))
    path = tmp_path / "host.toml"
    path.write_text(host_text(described, replace(MEASUREMENT, busy=True)))
    file = read_file(path)
    again = file.host
    assert file.measurement == replace(MEASUREMENT, busy=True)
    assert (again.isas, again.cores, again.threads, again.memory, again.gpus, again.processor) == (
        *(described.isas, described.cores, described.threads, described.memory, described.gpus, described.processor),
    )
    assert again.rates.origin == "measured" and again.rates.busy and again.rates.when == "2026-11-27"
    usual = described.rates
    for name, figures in usual.cpu.products.items():
        for threads, figure in figures.items():
            assert again.rates.cpu.products[name][threads].median == pytest.approx(figure.median, rel=1e-3)
    assert again.rates.gpus[1].bus.median == pytest.approx(usual.gpus[1].bus.median)
    assert again.rates.peer == usual.peer


def measured(folder: Path, here: Host, **changed: object) -> measured_host.Known:
    """Read the measurement of a machine that `changed` since."""
    path = folder / "host.toml"
    path.write_text(host_text(here, MEASUREMENT))
    return measured_host.known_host(replace(here, **changed), path)  # pyright: ignore[reportArgumentType]


def test_a_measurement_is_used_on_its_machine_alone(tmp_path: Path) -> None:
    here = replace(host.detect(), gpus=(Gpu("card", 8 << 30),))
    known = measured(tmp_path, here)
    assert known.stale is None and known.measurement == MEASUREMENT
    assert known.host.rates.origin == "measured"
    assert measured(tmp_path, here, memory=round(1.01 * here.memory)).stale is None
    for changed in (
        *({"gpus": ()}, {"cores": here.cores + 1}, {"threads": here.threads + 1}, {"numa": here.numa + 1}),
        *({"memory": 2 * here.memory}, {"processor": "another"}, {"isas": ("scalar",)}),
    ):
        known = measured(tmp_path, here, **changed)
        assert known.stale is not None and known.stale.code == "H206" and known.measurement is None
        assert known.host.rates.origin == "assumed"


def test_an_invalid_measurement_is_a_warning_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert measured_host.this_host().notes == ()
    path = measured_host.measured_path()
    assert path == tmp_path / "ktc" / "host.toml"
    path.parent.mkdir()
    path.write_text("cores = 0")
    (note,) = measured_host.this_host().notes
    assert note.code == "H207" and note.severity == "warning" and "`cores` must be" in note.message
    path.write_text(f"cores = {host.detect().cores}")
    (note,) = measured_host.this_host().notes
    assert note.code == "H206" and "described, not measured" in note.message


@pytest.mark.parametrize("name", host_file.bundled_names())
def test_bundled_machines_are_valid_and_have_rates(name: str) -> None:
    described = read_host(name)
    assert described.processor
    assert described.rates.origin == "described"
    assert len(described.rates.gpus) == len(described.gpus)


def test_the_page_of_host_files_has_every_key_and_an_example(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "hosts.md").read_text(encoding="utf-8")
    example = page.partition("```toml\n")[2].partition("```")[0]
    assert read(tmp_path, example).rates.origin == "described"
    missing = [key for key in (*CPU_KEYS, *GPU_KEYS, *TABLES, *host_file.bundled_names()) if key not in page]
    assert not missing


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputRefused) as caught:
        read_host("h10")
    (fault,) = caught.value.diagnostics
    assert fault.code == "H205" and all(f"`{name}`" in fault.hint for name in host_file.bundled_names())
