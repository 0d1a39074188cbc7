"""`ktc bench attention`: every model and context is measured beside PyTorch; a machine without a GPU is refused."""

from __future__ import annotations

import json

import pytest
import torch

from ktc.cli import app as cli
from ktc.tools.bench import attention
from ktc.tools.bench.attention import CacheSizes, run_on
from ktc.tools.bench.layer_requests import Attention
from ktc.tools.bench.options import parse
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import tables


def test_both_compute_the_same_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"v2lite": CacheSizes(2, 4, 1, 512, 16, 0), "qwen3_30b": CacheSizes(2, 4, 2, 32, 0, 32)}
    monkeypatch.setattr(attention, "SIZES", sizes)
    asked = parse(Attention, {"models": "v2lite,qwen3_30b", "contexts": "5,40", "rounds": 1})
    report = run_on(torch.device("cpu"), asked, ProgressSink(lambda *_: None, lambda *_: None, lambda _: None))
    assert [(row.model, row.context) for row in report.rows] == [
        (model, context) for model in ("v2lite", "qwen3_30b") for context in (5, 40)
    ]
    for row in report.rows:
        assert row.difference <= 0.01
        assert row.faster == pytest.approx(row.torch_us / row.ktc_us)
        assert row.share == pytest.approx(row.cache_mb / row.ktc_us * 1e3 / report.gbps)
    assert report.rows[3].cache_mb == pytest.approx(40 * 2 * 2 * 64 / 1e6)
    assert json.loads(json.dumps(report.to_json()))["rows"][0]["batch"] == 1
    assert len(tables(report).renderables) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "attention", "--json"]) == 3
    (diagnostic,) = json.loads(capfd.readouterr().out)["diagnostics"]
    assert diagnostic["code"] == "H244"
