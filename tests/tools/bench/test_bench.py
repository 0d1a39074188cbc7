"""`ktc bench moe`: what it measures is a contract, what it cannot measure is said, and nothing is refused too late."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from kt_stub import TINY, Bench, KtPython
from rich.console import Console

from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import host, resources
from ktc.model.experts.trained.lora import MAX_RANK
from ktc.model.kernels.fused_moe_spec import KERNELS
from ktc.tools.bench import layer_requests, moe, ours, peers, requests
from ktc.tools.bench.layer_requests import DEFAULT_IMPLS, Moe
from ktc.tools.bench.moe import MoeReport, Row, absent, left_out
from ktc.tools.bench.options import parse
from ktc.tools.bench.report import tables
from ktc.training.trainers.step_trace import TRACED_STEP

CUSTOM = {"shape_name": "custom", "hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2}


def asked(**typed: object) -> Moe:
    """Return the request of typed words, of a custom shape."""
    return parse(Moe, {**CUSTOM, **typed})


def test_a_child_s_figures_are_shares_of_its_own_limits(bench: Bench, kt_python: KtPython) -> None:
    asked = ("--impl", "kt_kernel,kt_kernel_int8", "--isa", "scalar", "--tokens", "130", "--json")
    code, out, err = bench(*TINY, *asked, "--kt-python", kt_python("works"))
    assert code == 0, err
    plain, int8 = json.loads(out)["rows"]
    # The stub's clock says 2 ms and its limits 1 TFLOP/s and 1 GB/s; 8 experts of 64 x 32 are in use.
    assert plain["cpu_ms"] == pytest.approx(2.0)
    assert plain["gflops"] == pytest.approx(2 * 130 * 2 * 3 * 64 * 32 / 2e-3 / 1e9)
    assert plain["share_of_peak"] == pytest.approx(plain["gflops"] / 1000)
    assert plain["gbps"] == pytest.approx(8 * 3 * 64 * 32 * 2 / 2e-3 / 1e9)
    assert int8["share_of_bandwidth"] == pytest.approx(plain["gbps"] / 2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("dies", "its process ended with status 1: no kernels for this processor"),
        ("fails", "it failed: RuntimeError: no such class"),
        ("chatters", "its process answered no JSON: b'hello"),
        ("lies", "its process answered `-1` as cpu"),
    ],
)
def test_a_peer_that_fails_is_left_out_with_its_words(
    bench: Bench, kt_python: KtPython, words: str, reason: str
) -> None:
    asked = ("--impl", "onednn_dense,kt_kernel", "--isa", "scalar", "--tokens", "130", "--json")
    code, out, err = bench(*TINY, *asked, "--kt-python", kt_python(words))
    assert code == 0, err
    found = json.loads(out)
    assert [row["impl"] for row in found["rows"]] == ["onednn_dense"]
    assert reason in found["left_out"][0]["reason"]


def test_kt_kernel_that_cannot_be_opened_ends_the_run(bench: Bench, kt_python: KtPython) -> None:
    for python, said in ((kt_python("is absent"), "No module named 'kt_kernel'"), ("/no/such/python", "cannot be run")):
        code, out, _ = bench(*TINY, "--impl", "kt_kernel", "--kt-python", python, "--json")
        assert code == 3
        (diagnostic,) = json.loads(out)["diagnostics"]
        assert diagnostic["code"] == "H241"
        assert said in diagnostic["message"]


def test_kt_kernel_that_was_named_and_is_not_here_ends_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moe, "has_kt", False)
    assert bench(*TINY, "--impl", "kt_kernel")[0] == 3
    assert bench(*TINY, "--impl", "kt")[0] == 3


def test_kt_kernel_that_nobody_asked_for_and_is_broken_is_left_out(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("kt_kernel.py").write_text("raise ImportError('no libnuma')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(layer_requests, "DEFAULT_IMPLS", ("onednn_dense", "kt_kernel"))
    asked = (*TINY, "--isa", "scalar", "--tokens", "130", "--json")
    code, out, err = bench(*asked)
    assert code == 0, err
    found = json.loads(out)
    assert [row["impl"] for row in found["rows"]] == ["onednn_dense"]
    assert "ImportError: no libnuma" in found["left_out"][0]["reason"]
    assert bench(*asked, "--impl", "kt_kernel")[0] == 3


def test_threads_are_no_more_than_the_share_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    assert asked(threads=8).threads == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert asked(threads=2).threads == 2
    with pytest.raises(InputRefused, match="more than the 2 that this process may use"):
        asked(threads=3)


def test_every_format_of_every_kernel_can_be_asked_for() -> None:
    for isa in host.detect().isas:
        request = asked(hidden=256, intermediate=256, isas=isa, impls="ktc")
        assert [spec.format_down for _, spec in ours.kernels_of(request)] == list(KERNELS[isa])


def test_formats_of_a_group_that_a_shape_cannot_hold_are_left_out_with_the_reason() -> None:
    request = asked(hidden=48, impls="ktc", tokens="1")
    measured = {impl for impl, _ in ours.kernels_of(request)}
    assert {"ktc_bf16", "ktc_int8", "ktc_fp16"} <= measured
    reasons = {entry.impl: entry.reason for entry in absent(request, {})}
    assert reasons.keys() == {*request.impls} - measured
    assert reasons["ktc_q4_k"] == "cuts rows into groups or blocks, of which this shape has no whole number"


def test_a_run_of_which_nothing_is_left_says_why(bench: Bench) -> None:
    code, out, _ = bench(*TINY, "--impl", "onednn_dense", "--tokens", "1")
    assert code == 0
    assert out.startswith("nothing was measured\nnot measured: onednn_dense (forward 1): reads one expert alone")


def test_groups_stand_for_their_members_and_repeats_are_dropped() -> None:
    request = asked(impls="hf,hf_eager,onednn_dense", tokens="4,1,4", lora_ranks="8,0")
    assert request.impls == ("hf_eager", "hf_grouped_mm", "hf_batched_mm", "onednn_dense")
    assert (request.tokens, request.lora_ranks) == ((4, 1), (8, 0))
    assert asked().impls == DEFAULT_IMPLS


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({**CUSTOM, "experts": None}, "`--shape custom` needs `--experts`"),
        ({**CUSTOM, "top_k": 9}, "a token cannot choose 9 of 8 experts"),
        ({"shape_name": "v2light"}, "`--shape` knows no `v2light`"),
        ({"hidden": 64}, "`--hidden` is for `--shape custom`"),
        ({"tokens": "1,two"}, "`--tokens` takes numbers from 1 to 1048576, found `two`"),
        ({"tokens": "0"}, "`--tokens` takes numbers from 1"),
        ({"tokens": ","}, "`--tokens` is empty"),
        ({"passes": "backward"}, "`--pass` knows no `backward`"),
        ({"impls": "ktc_bf61"}, "`--impl` knows no `ktc_bf61`"),
        ({"impls": "ktc_fp64", "isas": "avx2"}, "`ktc_fp64` has no kernel for `avx2`"),
        ({"lora_ranks": "129"}, "`--lora-rank` takes numbers from 0 to 128, found `129`"),
        ({**CUSTOM, "impls": "ktc_int4", "hidden": 40}, "`int4` cuts rows into groups"),
        ({**CUSTOM, "impls": "ktc_q4_k", "hidden": 128}, "`q4_k` cuts rows into groups or blocks"),
        ({"isas": "sse"}, "unknown instruction set `sse`"),
        ({"threads": 1 << 20}, "`--threads 1048576` is more than the"),
        ({"experts": 65}, "`v2lite` has 64 experts; more are for `--shape custom`"),
        ({"impls": "ktc_bf16", "kt_python": Path("python")}, "`--kt-python` is for kt_kernel, which `--impl` leaves"),
    ],
)
def test_what_makes_no_sense_is_refused(typed: dict[str, object], message: str) -> None:
    with pytest.raises(InputRefused) as refusal:
        parse(Moe, typed)
    assert message in str(refusal.value)


def test_experts_that_do_not_fit_are_refused_with_a_number_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 16 * 2**30
    monkeypatch.setattr(moe.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
    request = parse(Moe, {"shape_name": "v3", "tokens": "1", "impls": "ktc_bf16,hf_grouped_mm"})
    with pytest.raises(HostLacks) as refusal:
        moe.require_room(request)
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.code == "H240"
    assert "need 43.0 GiB" in diagnostic.message
    assert "`--experts 64` would fit" in diagnostic.hint
    moe.require_room(replace(request, experts=64))


@pytest.mark.parametrize(("name", "code"), [("roofline.pdf", 2), ("no/such/folder/roofline.svg", 2)])
def test_a_plot_that_cannot_be_is_refused_before_anything_is_measured(
    bench: Bench, tmp_path: Path, name: str, code: int
) -> None:
    assert bench(*TINY, "--impl", "onednn_dense", "--plot", os.fspath(tmp_path / name))[0] == code


def test_an_output_that_cannot_be_is_refused_before_anything_is_measured(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        pytest.fail("measured")

    monkeypatch.setattr(moe, "run", run)
    tmp_path.joinpath("file").touch()
    both = os.fspath(tmp_path / "both.svg")
    for output, said in ((tmp_path, "it is a folder"), (tmp_path / "file" / "a.json", "is not a folder")):
        code, _, err = bench(*TINY, "--impl", "onednn_dense", "-o", os.fspath(output))
        assert (code, "U003" in err, said in " ".join(err.split())) == (2, True, True)
    code, _, err = bench(*TINY, "--impl", "onednn_dense", "-o", both, "--plot", both)
    assert (code, "U030" in err) == (2, True)


def test_a_plot_without_matplotlib_is_refused(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.tools.bench.plot.importlib.util.find_spec", lambda name: None)
    code, _, err = bench(*TINY, "--impl", "onednn_dense", "--plot", str(tmp_path / "roofline.png"))
    assert (code, "error[H242]" in err) == (3, True)


def test_the_table_is_what_a_person_reads(golden: Callable[[str, str], None]) -> None:
    def row(impl: str, ms: float, isa: str = "", speedup: float | None = None) -> Row:
        return Row(
            impl=impl, passes="forward", shape="custom H64 I32 E8 k2", tokens=512, ms=ms, gflops=100 / ms,
            share_of_peak=0.5 / ms, gbps=30 / ms, share_of_bandwidth=0.9 / ms, isa=isa, lora_rank=8, threads=1,
            rounds=5, cpu_ms=ms, wall_ms=ms, best_ms=ms, ktc_speedup=speedup,
        )  # fmt: skip

    host = {"cpu": "a CPU", "isa": ["avx2", "scalar"], "threads": 1, "clock": "cpu"}
    rows = (row("ktc_bf16", 1.0, "avx2"), row("ktc_bf16", 4.0, "scalar"), row("hf_eager", 1500.0, speedup=1500.0))
    missing = tuple(left_out("onednn_dense", "has no LoRA", passes, 512, 8) for passes in ("forward", "train"))
    printed = Console(width=120, file=StringIO())
    report = MoeReport(host=host, peak_gflops=500.0, read_gbps=40.0, rows=rows, left_out=missing)
    printed.print(tables(report))
    golden("bench_table.txt", cast("StringIO", printed.file).getvalue())


def test_constants_of_requests_are_those_of_the_kernels_and_the_trace() -> None:
    assert (layer_requests.MAX_RANK, requests._TRACED_STEP) == (MAX_RANK, TRACED_STEP)


def test_peers_that_are_not_installed_are_refused_in_one_message(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "peers", lambda: tmp_path / "no")
    monkeypatch.setattr(peers, "_PACKAGE", "ktc_peers_of_no_wheel")
    code, out, _ = bench(*TINY, "--impl", "hf_eager", "--isa", "scalar", "--json")
    (diagnostic,) = json.loads(out)["diagnostics"]
    assert (code, diagnostic["code"]) == (2, "U014")
    assert "come with the source" in diagnostic["message"]
