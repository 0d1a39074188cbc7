"""`ktc bench decode`: the file holds what it says, both engines read it alike, and invalid requests are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from ktc.cli.app import main
from ktc.diagnostics import InputRefused
from ktc.foundation.formats import STORED
from ktc.model.checkpoint import open_index
from ktc.tools.bench.decode.engines import LocalEngine, prompt_of
from ktc.tools.bench.decode.model_file import (
    FILE,
    cache_bytes,
    config_of,
    floor_bytes,
    tensors_of,
    weight_bytes,
    write_model,
)
from ktc.tools.bench.decode.parts import parts_of
from ktc.tools.bench.decode.run import Agreement, DecodeReport, Row, agreement_of, figures
from ktc.tools.bench.options import parse
from ktc.tools.bench.peers import peer
from ktc.tools.bench.report import tables
from ktc.tools.bench.requests import FILE_FORMATS, LLAMA_PYTHON, Case, Decode
from ktc.tools.bench.sizes import SIZES

stock = peer("stock")
CHECKOUT = Path(__file__).parents[3]


@pytest.mark.parametrize("file_format", FILE_FORMATS)
def test_a_written_file_has_the_sizes_and_formats_that_were_asked_for(tmp_path: Path, file_format: str) -> None:
    folder = write_model("tiny", 1, file_format, tmp_path)
    index, config = open_index(folder), config_of(SIZES["tiny"], 1)
    written = tensors_of(config, "olmoe", file_format)
    assert {tensor.name for tensor in written} == set(index.tensors)
    for tensor in written:
        entry = index.tensors[tensor.name]
        assert (entry.shape, entry.end - entry.begin) == (tensor.shape, tensor.nbytes)
        assert STORED[entry.dtype].name == tensor.format
    head = {"q4_k": "q6_k", "mxfp4": "q8_0"}.get(file_format, file_format)
    assert STORED[index.tensors["output.weight"].dtype].name == head
    model = stock.of_checkpoint(folder, config)
    matrices = [weight.detach().float() for weight in model.parameters() if weight.dim() > 1]
    assert all(0.005 < float(weight.std()) < 0.1 for weight in matrices)
    experts = model.get_submodule("model.layers.0.mlp.experts").get_parameter("down_proj")
    assert torch.equal(experts[3].roll(-3, 0), experts[0]) and not torch.equal(experts[3], experts[0])


def test_a_folder_is_written_once_for_the_same_request(tmp_path: Path) -> None:
    file = write_model("tiny", 1, "q8_0", tmp_path) / FILE
    before = file.stat().st_mtime_ns
    assert write_model("tiny", 1, "q8_0", tmp_path) == tmp_path and file.stat().st_mtime_ns == before
    write_model("tiny", 2, "q8_0", tmp_path)
    assert file.stat().st_mtime_ns != before


def test_a_cache_is_the_same_before_and_after_a_round(tmp_path: Path) -> None:
    config = config_of(SIZES["tiny"], 1)
    engine = LocalEngine("hf", stock.of_checkpoint(write_model("tiny", 1, "bf16", tmp_path), config))
    for case in (Case("decode", 1, 0), Case("decode", 2, 5)):
        engine.prepare(case)
        for _ in range(2):
            assert engine.run(case).wall > 0
            assert engine._cache.get_seq_length() == max(1, case.tokens)
    assert engine.logits(prompt_of(3, 512)).shape == (512,)


def test_parts_are_of_steps_that_call_modules(tmp_path: Path) -> None:
    model = stock.of_checkpoint(write_model("tiny", 1, "bf16", tmp_path), config_of(SIZES["tiny"], 1))
    program: Any = SimpleNamespace(step=lambda *_args, **_kwargs: None)
    model.decode_graphs = program
    assert parts_of(LocalEngine("hf", model), Case("decode", 1, 5))["linears"] > 0
    assert model.decode_graphs is program


def test_the_floor_counts_active_experts_and_the_cache() -> None:
    config = config_of(SIZES["olmoe"], 1)
    tensors = tensors_of(config, "olmoe", "q8_0")
    experts = sum(tensor.nbytes for tensor in tensors if "_exps" in tensor.name)
    assert experts == 64 * 3 * 2048 * 1024 * 34 // 32
    others = sum(t.nbytes for t in tensors if "_exps" not in t.name and not t.name.startswith("token_embd"))
    row = 2048 * 34 // 32  # of the table
    assert weight_bytes(tensors, config, 1) == pytest.approx(experts * 8 / 64 + others + row)
    assert weight_bytes(tensors, config, 8) == pytest.approx(experts * (1 - (7 / 8) ** 8) + others + 8 * row)
    case = Case("decode", 8, 512)
    assert cache_bytes(config, case) == 8 * 512 * 2 * 16 * 128 * 2
    assert floor_bytes(tensors, config, case) == weight_bytes(tensors, config, 8) + cache_bytes(config, case)


def test_agreement_is_of_rankings_and_values() -> None:
    ours = [torch.arange(20.0), torch.arange(20.0)]
    other = torch.arange(20.0)
    other[19], other[0] = 0.0, 19.0
    found = agreement_of("x", ours, [ours[0], other])
    assert (found.same_next, found.prompts) == (1, 2) and found.common == pytest.approx(0.95)
    assert agreement_of("x", ours, ours) == Agreement("x", 2, 0.0, 2, 1.0)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"model": "olmo"}, "`--model` knows no `olmo`"),
        ({"file_format": "q5_1"}, "`--format` knows no `q5_1`"),
        ({"model": "gpt_oss_20b", "file_format": "q4_k"}, "blocks of 256 weights, gpt_oss_20b has rows of 2880"),
        ({"batches": "0"}, "`--batch` takes numbers from 1"),
        ({"contexts": "-1"}, "`--context` takes numbers from 0"),
        ({"impls": "llama.cpp"}, "`--impl` knows no `llama.cpp`"),
        ({"peers": "vllm"}, "`--peer` knows no `vllm`"),
        ({"peer_python": Path("x")}, "`--peer-python` is for a `--peer`"),
        ({"impls": "hf", "profile": True}, "`--profile` is of ktc's steps"),
        ({"impls": ""}, "nothing is left"),
    ],
)
def test_invalid_requests_are_refused(words: dict[str, object], why: str) -> None:
    with pytest.raises(InputRefused, match=why):
        parse(Decode, words)


def test_a_request_has_every_case_and_engine() -> None:
    request = parse(
        Decode, {"batches": "1,8", "contexts": "0,512", "prefill": "64", "impls": "ktc,hf", "peers": "llama.cpp"}
    )
    assert [str(case) for case in request.cases] == [
        "decode, batch 1, context 0", "decode, batch 1, context 512", "decode, batch 8, context 0",
        "decode, batch 8, context 512", "prefill of 64",
    ]  # fmt: skip
    assert (request.impls, request.peers) == (("ktc", "hf"), ("llama.cpp",))
    assert request.peer_python == LLAMA_PYTHON.absolute()


def test_the_table_has_shares_ratios_parts_and_agreement() -> None:
    decode, prefill = Case("decode", 8, 512), Case("prefill", 1, 64)
    times = {"best_ms": 9.0, "cpu_ms": 10.0, "wall_ms": 11.0, "rounds": 3, "read_gbps": 20.0}

    def row(impl: str, case: Case, ms: float, floor: float | None, speedup: float | None = None) -> Row:
        return Row(impl=impl, case=case, ms=ms, ktc_speedup=speedup, **figures(case, ms, floor), **times)

    rows = (
        row("llama.cpp", decode, 5.0, 4.0, 0.5),
        row("ktc", decode, 10.0, 4.0),
        row("llama.cpp", prefill, 200.0, None, 2.0),
    )
    host = {"cpu": "C", "isa": "avx2", "threads": 1, "clock": "cpu"}
    agreement = (Agreement("llama.cpp", 4, 0.01, 4, 1.0),)
    parts = {str(decode): {"experts": 6.0, "rest": 4.0}}
    report = DecodeReport(
        host=host,
        model="olmoe",
        file_format="q8_0",
        layers=4,
        read_gbps=20.0,
        rows=rows,
        agreement=agreement,
        parts=parts,
    )
    found = json.loads(json.dumps(report.to_json()))
    assert found["rows"][1]["share_of_floor"] == pytest.approx(0.4)
    assert found["rows"][0]["tokens_per_second"] == pytest.approx(1600)
    assert found["rows"][2]["tokens_per_second"] == pytest.approx(320) and found["rows"][2]["floor_ms"] is None
    assert found["speedup"] == {"llama.cpp": pytest.approx(1.0)}
    console = Console(width=140, record=True)
    console.print(tables(report))
    text = console.export_text()
    for words in ("0.50x as fast", "2.00x as fast", "1,600.0", "experts", "10.0", "1.0e-02 from ktc's", "is 1.00x as"):
        assert words in text


def test_a_missing_llama_cpp_is_told_before_anything_is_compiled(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "decode", "--model", "tiny", "--peer", "llama.cpp", "--peer-python", "/no/python", "--json"])
    (diagnostic,) = json.loads(capfd.readouterr().out)["diagnostics"]
    assert (code, diagnostic["code"]) == (3, "H245") and "cannot be run" in diagnostic["message"]


@pytest.mark.slow
@pytest.mark.parametrize("file_format", FILE_FORMATS)
def test_llama_cpp_and_ktc_rank_the_next_tokens_alike(
    tmp_path: Path, file_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp rounds rows of activations to 8 bits where weights are blocks, so values differ by about 1e-2."""
    python = CHECKOUT / LLAMA_PYTHON
    if not python.is_file():
        pytest.skip("llama.cpp is not installed: `make llama-environment`")
    words = ["--format", file_format, "--batch", "1", "--context", "3", "--prefill", "8", "--rounds", "1", "--json"]
    asked = ["bench", "decode", "--model", "tiny", "--peer", "llama.cpp", "--peer-python", str(python), *words]
    assert main(asked) == 0
    (found,) = json.loads(capfd.readouterr().out)["agreement"]
    agreement = SimpleNamespace(**found)
    assert agreement.error < 3e-2 and agreement.common >= 0.8
