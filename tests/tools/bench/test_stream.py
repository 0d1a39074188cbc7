"""`ktc bench stream`: every number of tokens and the bus are measured; a machine without a GPU or memory is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from kernel_layers import ISAS, built, spec_of

from ktc.cli import app as cli
from ktc.diagnostics import HostLacks
from ktc.tools.bench import ours, stream
from ktc.tools.bench.layer_requests import Stream
from ktc.tools.bench.options import parse
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import tables
from ktc.tools.measure import bus as buses

CPU = torch.device("cpu")
SPEC = spec_of(ISAS[0], codes=("int4", 32))


def asked() -> Stream:
    sizes = {"shape_name": "custom", "hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2}
    return parse(Stream, {**sizes, "tokens": "3,40", "rounds": 2, "weight_format": "int4"})


@pytest.fixture(autouse=True)
def _built_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a kernel of any size that other quick tests build too."""
    monkeypatch.setattr(ours, "spec_of", lambda shape, isa, weight_format: SPEC)
    monkeypatch.setattr(stream.build, "build", lambda source, host: built((SPEC,)))


def test_forward_backward_and_the_bus_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buses, "_CHUNK", 10_000)
    told: list[tuple[str, int, int]] = []
    sink = ProgressSink(lambda *_: None, lambda *step: told.append(step), lambda _: None)
    report = stream.run_on(CPU, asked(), SPEC, sink)
    assert [row.tokens for row in report.rows] == [3, 40]
    assert report.layer_bytes == 8 * 3 * 256 * 128 * (0.5 + 2 / 32)
    assert report.bus_gbps == pytest.approx(report.layer_bytes / report.bus_ms / 1e6)
    for row in report.rows:
        assert min(row.forward_ms, row.backward_ms) > 0
        assert row.forward_gbps == pytest.approx(report.layer_bytes / row.forward_ms / 1e6)
        assert row.of_bus == pytest.approx(max(row.forward_ms, row.backward_ms) / report.bus_ms)
    assert told[-1] == ("40 tokens", 1, 2)
    assert json.loads(json.dumps(report.to_json()))["weight_format"] == "int4"
    assert len(tables(report).renderables) == 2


def test_the_bus_copies_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buses, "_CHUNK", 1000)
    copied: list[int] = []
    bus = buses.Bus(2500, CPU)
    plain = bus._chunk
    monkeypatch.setattr(
        bus, "_chunk", lambda number, start: copied.append(min(1000, 2500 - start)) or plain(number, start)
    )
    assert bus.copy() > 0
    assert copied == [1000, 1000, 500]


def test_a_layer_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "packed_bytes", lambda spec: 5 << 30)
    monkeypatch.setattr(stream.psutil, "virtual_memory", lambda: SimpleNamespace(available=6 << 30))
    with pytest.raises(HostLacks, match=r"H240: these experts need 7.0 GiB of memory, and 6.0 GiB are free"):
        stream.require(SPEC, gpus=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "stream", "--shape", "v2lite", "--format", "int4", "--json"]) == 3
    (diagnostic,) = json.loads(capfd.readouterr().out)["diagnostics"]
    assert diagnostic["code"] == "H244"
