"""A model on a GPU whose embedding is on the host: the first layer's input is there, its experts' rows are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from places import ROOT
from transformers import TrainingArguments

import ktc
from ktc.model.experts.host.staging import to_device
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer

pytestmark = pytest.mark.usefixtures("one_thread")
TABLE = "\nrule table { match embedding => place(cpu) }\n"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def losses(out: Path, folder: Path, device: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = get_peft_model(ktc.load(out), read_lora_config(out))
    for module in model.modules():
        if isinstance(module, FusedMoe) and module.offload is not None:
            module.offload = replace(module.offload, min_tokens=1, resident=True)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, model.config.vocab_size, (length,), generator=generator) for length in (12, 20, 31, 9) * 3]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=4,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=5e-3, bf16=True,
        use_cpu=device == "cpu",
    )  # fmt: skip
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    trainer = KTrainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    assert str(trainer.stacker.decision).startswith("stacked")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def test_losses_are_those_of_a_table_beside_the_layers(
    device: str, tmp_path: Path, compiled_twin: Callable[..., Path]
) -> None:
    program = tmp_path / "table.ktr"
    program.write_text((ROOT / "rules" / "moe-experts-lora.ktr").read_text(encoding="utf-8") + TABLE, encoding="utf-8")
    settings = {"device": device, "prefill": device}
    found = losses(ktc.compile("tiny:gpt_oss", program, tmp_path / "away", settings=settings), tmp_path / "a", device)
    wanted = losses(
        ktc.compile("tiny:gpt_oss", "moe-experts-lora", tmp_path / "beside", settings=settings), tmp_path / "b", device
    )
    assert len(found) == 3
    assert found == pytest.approx(wanted, rel=5e-3)


@needs_gpu
def test_rows_that_leave_a_gpu_have_their_gradient_there() -> None:
    rows = torch.randn(4, 3, device="cuda:0", requires_grad=True)
    host = to_device(rows, torch.device("cpu"))
    assert torch.equal(host, rows.detach().cpu())
    (2 * host).sum().backward()
    assert rows.grad is not None
    assert rows.grad.is_cuda
    assert torch.equal(rows.grad.cpu(), torch.full((4, 3), 2.0))
