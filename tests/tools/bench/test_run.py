"""`ktc bench moe` from end to end, on the kernels of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_layers import spec_of
from kt_stub import TINY, Bench, KtPython

from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.tools.bench import ours

CONTRACT = {
    "impl", "pass", "shape", "tokens", "ms", "gflops", "share_of_peak", "gbps", "share_of_bandwidth", "best_ms",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _built_kernels(kernels: KernelLibrary) -> Iterator[None]:
    """Those of any size, which are there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "spec_of", lambda shape, isa, weight_format: spec_of(isa))
        patch.setattr(ours.build, "build", lambda source, host: kernels)
        yield


def test_a_run_is_one_object_as_the_contract_says(bench: Bench, tmp_path: Path, kt_python: KtPython) -> None:
    asked = ("--impl", "ktc_bf16,hf,onednn_dense,kt_kernel", "--tokens", "1,130", "--lora-rank", "0,4")
    where = ("-o", str(tmp_path / "found.json"), "--plot", str(tmp_path / "roofline.svg"))
    others = ("--pass", "forward,train", "--json", "--kt-python", kt_python("works"))
    code, out, err = bench(*TINY, *asked, *others, *where)
    assert code == 0, err
    found = json.loads(out)
    assert {"host", "peak_gflops", "read_gbps", "rows", "left_out"} <= found.keys()
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert (tmp_path / "roofline.svg").read_text().startswith("<?xml")
    rows = found["rows"]
    assert all(row.keys() >= CONTRACT and row["ms"] > 0 and row["rounds"] == 1 for row in rows)
    measured = {(row["impl"], row["pass"], row["tokens"], row["lora_rank"]) for row in rows}
    for impl in ("ktc_bf16", "hf_eager", "hf_grouped_mm", "hf_batched_mm", "kt_kernel"):
        assert {
            (impl, way, tokens, rank) for way in ("forward", "train") for tokens in (1, 130) for rank in (0, 4)
        } <= (measured), impl
    assert ("onednn_dense", "train", 130, 0) in measured
    left_out = {(each["impl"], each["tokens"], each["lora_rank"]) for each in found["left_out"]}
    assert left_out == {("onednn_dense", 1, 0), ("onednn_dense", 1, 4), ("onednn_dense", 130, 4)}
    assert all((row["ktc_speedup"] is None) == (row["impl"] == "ktc_bf16") for row in rows)
    assert found["host"]["kt_kernel"] == {"version": "0"}
