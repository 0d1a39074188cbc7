"""`ktc bench generate`: real steps of a config alone, refusals, and ways to compute that say why they are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kernel_layers import SPECS, experts_of
from places import CONFIGS
from torch import nn

from ktc.cli import app as cli
from ktc.model.experts.backends.backend import Offload
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.tools.bench import generate
from ktc.tools.bench.floor import MinuteRates, Read, floor_of, reason_against, weights_read
from ktc.tools.bench.generate import Row, Tokens, experts_bytes, floor_text, shares_of, shares_text
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import LeftOut
from ktc.tools.bench.rounds import StepClock

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(*options)` is `ktc bench generate`: its exit code, stdout and stderr."""

    def call(*options: object) -> tuple[int, str, str]:
        code = cli.main(["bench", "generate", *map(str, options)])
        return (code, *capfd.readouterr())

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rows of a machine without a GPU")
def test_steps_of_a_config_alone(run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.compiler.proven", lambda analysis, observe: (analysis, ()))
    output = tmp_path / "found.json"
    code, out, _ = run(
        "--config", checkpoint, "--rule", "moe-experts-lora", "--batch", "1,2", "--context", "5", "--steps", 9,
        "--impl", "ktc,eager,hf", "-o", output,
    )  # fmt: skip
    assert code == 0
    found = json.loads(output.read_text())
    assert [(row["impl"], row["batch"], row["context"], row["steps"]) for row in found["rows"]] == [
        ("ktc", 1, 5, 6), ("ktc", 2, 5, 6),
    ]  # fmt: skip
    assert all(row["ms"] >= row["best_ms"] > 0 and row["experts_ms"] > 0 for row in found["rows"])
    assert {each["impl"] for each in found["left_out"]} == {"eager", "hf"}
    assert "the compiled model has no graphs" in out


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--impl", "vllm"), "`--impl` knows no `vllm`"),
        (("--batch", "0"), "`--batch` takes numbers from 1"),
        (("--context", ","), "`--context` is empty"),
        (("--format", "int8", "--set", "format=bf16"), "name two formats"),
        (("--layers", "900"), "the model has 27"),
    ],
)
def test_invalid_options_are_refused(options: tuple[str, ...], fault: str, run: Run) -> None:
    code, _, err = run("--config", CONFIGS / "deepseek-v2-lite", *options)
    assert code == 2
    assert fault in err


def test_a_step_reads_the_experts_that_even_choices_hit(kernels: KernelLibrary) -> None:
    module = experts_of(8, 64, 32, 2)
    assert experts_bytes(module, 1) == 0  # a reference packs nothing
    packed = experts_of(8, 64, 32, 2, kernel=kernels.kernel(SPECS[0].entry))
    assert experts_bytes(packed, 1) == packed.packed_bytes * 2 / 8
    assert experts_bytes(packed, 2) == packed.packed_bytes * (1 - 0.75**2)


def test_experts_that_stay_on_a_gpu_are_not_read_on_the_cpu(kernels: KernelLibrary) -> None:
    resident = Offload((torch.device("cuda:0"),), 0, resident=True)
    assert experts_bytes(experts_of(8, 64, 32, 2, kernel=kernels.kernel(SPECS[0].entry), offload=resident), 1) == 0


def test_a_row_has_the_shares_of_the_engines_in_what_its_steps_read() -> None:
    assert shares_of({"gpu": 0, "bus": 0, "cpu": 0}) is None and shares_text(None) == "-"
    assert shares_text(shares_of({"gpu": 1, "bus": 1, "cpu": 2})) == "0.25, 0.25, 0.50"


def test_the_bytes_of_a_step_leave_out_those_of_the_first_steps() -> None:
    class Store:
        counted = 0

        def figures(self) -> SimpleNamespace:
            return SimpleNamespace(nbytes={"gpu": self.counted, "bus": 0, "cpu": 2 * self.counted})

    store, clock = Store(), StepClock()
    clock.start()
    tokens = Tokens(clock, None, cast("Any", [store]), 8)
    tokens.put(torch.zeros(1, 5))
    for token in range(12):
        store.counted += 1000 if token < 3 else 10  # graphs are captured in the first steps
        tokens.put(torch.zeros(1))
    assert tokens.read_of_step() == {"gpu": 10.0, "bus": 0.0, "cpu": 20.0}


def test_no_floor_is_printed_where_reads_are_not_counted(kernels: KernelLibrary) -> None:
    packed = experts_of(8, 64, 32, 2, kernel=kernels.kernel(SPECS[0].entry))
    assert not reason_against(nn.ModuleList([packed, nn.Conv1d(8, 8, 4, groups=8)]), 1)
    stock = nn.Module()
    stock.experts = nn.ParameterDict({"gate_up_proj": nn.Parameter(torch.zeros(8, 64, 32))})
    assert "experts.gate_up_proj" in reason_against(stock, 1)


def test_a_row_without_memory_says_so_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(impl: str, model: object, ids: torch.Tensor, *_: object) -> Row:
        if ids.shape[1] > 100:
            raise torch.OutOfMemoryError
        return Row(
            impl=impl, batch=1, context=5, steps=5, ms=1.0, best_ms=1.0, tokens_per_second=1.0, prompt_seconds=1.0,
            read_gbps=1.0, experts_ms=None, gpu_allocated=0,
        )  # fmt: skip

    monkeypatch.setattr(generate, "_row", row)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9))
    asked: Any = SimpleNamespace(batches=(1,), contexts=(999, 5), steps=8, seed=0)
    sink = ProgressSink(lambda *_: None, lambda *_: None, lambda _: None)
    nothing: Any = None
    stock = SimpleNamespace(stock_model=lambda *_: model)
    assert [type(each) for each in generate.peer_rows(stock, nothing, asked, nothing, sink)] == [LeftOut, Row]

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    stock.stock_model = full
    (left_out,) = generate.peer_rows(stock, nothing, asked, nothing, sink)
    assert left_out == LeftOut("hf", "the GPU has no memory for its weights")


def test_a_floor_has_the_bytes_of_each_engine_and_the_launches() -> None:
    rates = MinuteRates(gpu=4e12, bus=50e9, cpu=75e9, cpu_alone=100e9, kernel=1e-6, host_node=50e-6)
    split = floor_of(Read(gpu=4e9, bus=1e9, cpu=1.5e9, kernels=500, host_nodes=20), rates)
    assert (split.gpu_ms, split.experts_ms, split.launches_ms) == pytest.approx((1.0, 20.0, 1.5))
    assert split.ms == pytest.approx(22.5)
    alone = floor_of(Read(gpu=4e9, bus=0.0, cpu=2.5e9, kernels=500, host_nodes=20), rates)
    assert alone.experts_ms == pytest.approx(25.0)
    row = Row(
        impl="ktc", batch=1, context=5, steps=5, ms=30.0, best_ms=1.0, tokens_per_second=1.0, prompt_seconds=1.0,
        read_gbps=1.0, experts_ms=None, gpu_allocated=0, floor=split,
    )  # fmt: skip
    assert "22.50 ms, 0.75 of the step" in floor_text(row) and "500 kernels of 1.00 us" in floor_text(row)


def test_a_step_of_the_cpu_reads_nothing_on_a_gpu(kernels: KernelLibrary) -> None:
    assert weights_read(experts_of(8, 64, 32, 2, kernel=kernels.kernel(SPECS[0].entry)), 1) == (0.0, 1)
