"""On a machine with a GPU: attention there, experts on the CPU, one model for PEFT, the Trainer and generation."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import ktc
from ktc.foundation import resources
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer
from ktc.training.trainers import pass_graphs, step_passes
from ktc.training.trainers.expert_adapters import Adapters
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.layer_pass import Kept, Offloaded
from ktc.training.trainers.pass_graphs import PassGraphs
from ktc.training.trainers.split_layer import LayerCall, SplitLayer
from ktc.training.trainers.stacking import Stacker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module", params=["deepseek_v2", "qwen3_moe"])
def package(request: pytest.FixtureRequest, compiled_twin: Callable[..., Path]) -> ModuleType:
    out = compiled_twin(f"tiny:{request.param}", "moe-lora", "auto")
    sys.path.insert(0, str(out.parent))
    try:
        return importlib.import_module(out.name)
    finally:
        sys.path.remove(str(out.parent))


def tokens(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(3, model.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    return ids.to("cuda:0")


def test_attention_stands_on_the_gpu_and_experts_on_the_cpu(package: ModuleType) -> None:
    model = package.load()
    assert {p.device.type for n, p in model.named_parameters() if "experts" not in n} == {"cuda"}
    experts = [m for m in model.modules() if type(m).__name__ == "FusedMoe"]
    assert experts
    assert all(m.gate_up_proj.device.type == "cpu" for m in experts)


def test_logits_are_as_near_to_fp32_as_those_of_stock_bf16(package: ModuleType) -> None:
    source = json.loads((Path(str(package.__file__)).parent / "ktc.json").read_text())["model"]["folder"]
    model = package.load()
    ids = tokens(model)
    with torch.no_grad():
        exact = (
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to("cuda:0").eval()(input_ids=ids).logits
        )
        stock = (
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to("cuda:0").eval()(input_ids=ids).logits
        )
        ours = model(input_ids=ids).logits
    error = [float((found.float() - exact).norm() / exact.norm()) for found in (ours, stock)]
    assert error[0] <= 1.5 * error[1]
    assert ours.device.type == "cuda"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the stock Trainer would use DataParallel")
def test_it_trains_and_generates_across_the_devices(package: ModuleType, tmp_path: Path) -> None:
    model = package.load()
    adapted = get_peft_model(model, package.lora_config())
    rows = [{"input_ids": row.cpu(), "labels": row.cpu()} for row in tokens(model)]
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=2, report_to=[], logging_steps=1, bf16=True,
        learning_rate=2e-3, gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=adapted, args=settings, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    prompt = tokens(model)[:, :8]
    assert adapted.generate(input_ids=prompt, max_new_tokens=4, do_sample=False).shape == (2, 12)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_layers_spread_over_two_gpus_train_and_generate(tmp_path: Path) -> None:
    settings = {"split": "2"}
    out = ktc.compile(
        "tiny:deepseek_v3",
        resources.examples() / "deepseek-v3-multi-gpu-lora.ktr",
        tmp_path / "two_gpus",
        settings=settings,
    )
    model = ktc.load(out)
    devices = {str(p.device) for n, p in model.named_parameters() if ".self_attn." in n}
    assert devices == {"cuda:0", "cuda:1"}
    source = json.loads((out / "ktc.json").read_text())["model"]["folder"]
    ids = tokens(model)
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to("cuda:0").eval()(input_ids=ids)
        stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to("cuda:0").eval()(input_ids=ids)
        ours = model(input_ids=ids).logits.to("cuda:0")
    error = [float((found.float() - exact.logits).norm() / exact.logits.norm()) for found in (ours, stock.logits)]
    assert error[0] <= 1.5 * error[1]
    adapted = get_peft_model(model, read_lora_config(out))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-3)
    losses: list[float] = []
    for _ in range(6):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert adapted.generate(input_ids=ids[:, :8], max_new_tokens=4, do_sample=False).shape == (2, 12)


RULES = """
import "std/moe.ktr"
import "std/attention.ktr" as attn
rule experts   { match moe.block => cpu_moe() }
rule attention { match attn.mla as a  expect >= 0  => lora_linear on a.q_a, a.q, a.kv_a, a.kv_b, a.o }
rule all       { match module at "*" => place(cuda:0) }
lora { rank = 4  alpha = 8 }
"""
STREAMED = """
rule weights   { match module at "model.layers.*.self_attn" => place(stream = cuda:0) }
rule many      { match moe.opaque as m => place(cpu, prefill = cuda:0) on m.experts }
"""
PLANS = {
    "stays": "",
    "streamed": STREAMED + "plan { layerwise_prefill = 1  stream_buffer = 1MiB }",
    "resident": STREAMED + "plan { layerwise_prefill = 1  stream_buffer = 1MiB  cuda:0 = 20GiB }",
}


def losses_of_four_steps(plan: str, folder: Path) -> list[float]:
    rules = folder / f"{plan}.ktr"
    rules.write_text(RULES + PLANS[plan])
    out = ktc.compile("tiny:deepseek_v2", rules, folder / plan)
    torch.manual_seed(0)
    model = get_peft_model(ktc.load(out), read_lora_config(out)).eval()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.02)
    ids = tokens(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    losses: list[float] = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_weights_that_pass_through_the_gpu_train_as_those_that_stay(tmp_path: Path) -> None:
    expected = losses_of_four_steps("stays", tmp_path)
    assert expected[-1] < expected[0]
    for plan in ("streamed", "resident"):
        assert losses_of_four_steps(plan, tmp_path) == pytest.approx(expected, rel=0.01), plan


@pytest.mark.parametrize("tokens_of_a_pass", [1 << 20, 96])
def test_what_waits_in_host_memory_changes_no_step(
    tokens_of_a_pass: int, compiled_twin: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of experts, with their gradients and optimizer, and the states of layers: beside all on the GPU."""
    out = compiled_twin("tiny:qwen3_moe", "moe-experts-lora", "auto")
    monkeypatch.setattr(step_passes, "fitting_tokens", lambda *_: {"cuda:0": tokens_of_a_pass})
    initial: dict[str, torch.Tensor] = {}

    def run(
        *, on_host: bool, level: Offloaded, resident: bool = False
    ) -> tuple[list[float], dict[str, torch.Tensor], str]:
        monkeypatch.setattr(Adapters, "fits", not on_host)
        torch.manual_seed(0)
        model = get_peft_model(ktc.load(out), read_lora_config(out))
        for module in model.modules():
            if isinstance(module, FusedMoe):
                module.offload = Offload((torch.device("cuda:0"),), min_tokens=1, resident=resident)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=4,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.3, optim="sgd",
        )  # fmt: skip
        initial.update({name: weight.detach().cpu().clone() for name, weight in model.named_parameters()})
        ids = torch.randint(3, model.config.vocab_size, (12, 48), generator=torch.Generator().manual_seed(1))
        dataset = [{"input_ids": row, "labels": row} for row in ids]
        trainer = KTrainer(model=model, args=arguments, train_dataset=dataset, compile_layers=False)
        sized = Stacker._sized
        monkeypatch.setattr(Stacker, "_sized", lambda *given: replace(sized(*given), offloaded=level))
        trainer.train()
        monkeypatch.setattr(Stacker, "_sized", sized)
        decision = trainer.stacker.decision
        assert decision is not None
        keeps = resident and tokens_of_a_pass > 4 * 48
        assert decision.kept == Kept(keeps, model.config.num_hidden_layers if keeps else 0, replays=keeps)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = {name: weight.detach().cpu() for name, weight in model.named_parameters() if weight.requires_grad}
        return losses, weights, trainer.expert_adapters

    on_gpu, expected, where = run(on_host=False, level=Offloaded.NOTHING)
    assert "on cuda:0" in where
    change = float(torch.cat([weight.flatten() - initial[name].flatten() for name, weight in expected.items()]).norm())
    ways = [{"on_host": True, "level": level} for level in Offloaded]
    for way in (*ways, {"on_host": False, "level": Offloaded.NOTHING, "resident": True}):
        losses, weights, where = run(**way)
        assert ("in host memory" in where) == way["on_host"]
        assert losses == pytest.approx(on_gpu, rel=2e-3)
        away = torch.cat([weights[name].flatten() - weight.flatten() for name, weight in expected.items()])
        assert float(away.norm()) <= 0.06 * change  # sums in bf16 have another order


class Waiting(torch.nn.Module):
    """A layer that waits for the GPU, which a capture does not permit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * max(1.0, float(x.detach().abs().max().item()))


def test_after_a_capture_that_failed_the_gpu_works_as_before() -> None:
    gpu = torch.device("cuda:0")
    layer, graphs = Waiting().to(gpu), PassGraphs()
    call = ModelCall(torch.ones(1, 2, 4, device=gpu), (gpu,), (LayerCall(None, (), {}, ()),))

    def run() -> list[torch.Tensor]:
        return graphs.through([SplitLayer(layer, None, None)], [call], lambda chunks: [layer(c.hidden) for c in chunks])

    def active() -> int:
        torch.cuda.synchronize()
        torch.empty(1, device=gpu)  # the allocator looks for memory that streams have used
        return torch.cuda.memory_stats(gpu)["active_bytes.all.current"]

    expected, *_, last = [run()[0].detach() for _ in range(4)]
    assert "the capture failed: CUDA error: operation not permitted" in graphs.told
    assert torch.equal(last, expected)
    torch.rand(1, device=gpu)
    before = active()
    shared = torch.zeros(1 << 20, device=gpu)
    shared.record_stream(torch.cuda.Stream(gpu))
    del shared
    assert active() == before


@pytest.mark.slow
def test_steps_that_are_replayed_train_as_others(
    compiled_twin: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a pass as CUDA graphs beside launches one by one: losses, gradients and weights."""
    out = compiled_twin("tiny:qwen3_moe", "moe-experts-lora", "auto")

    def run(*, replays: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
        monkeypatch.setattr(pass_graphs, "_WASTED", 4 if replays else 0)
        torch.manual_seed(0)
        model = get_peft_model(ktc.load(out), read_lora_config(out))
        for module in model.modules():
            if isinstance(module, FusedMoe):
                module.offload = Offload((torch.device("cuda:0"),), min_tokens=1, resident=True)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=1, gradient_accumulation_steps=4,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.1, optim="sgd",
        )  # fmt: skip
        ids = torch.randint(3, model.config.vocab_size, (24, 48), generator=torch.Generator().manual_seed(1))
        dataset = [{"input_ids": row, "labels": row} for row in ids]
        trainer = KTrainer(model=model, args=arguments, train_dataset=dataset)
        trainer.train()
        assert ("are replayed as CUDA graphs" in str(trainer.stacker.decision)) == replays
        steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        return steps, {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}

    expected, replayed = run(replays=False), run(replays=True)
    assert replayed[0] == [pytest.approx(step, rel=1e-4) for step in expected[0]]
    for name, weight in expected[1].items():
        torch.testing.assert_close(replayed[1][name], weight, rtol=1e-3, atol=1e-5)
