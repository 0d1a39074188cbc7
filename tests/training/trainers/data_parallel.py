"""A process of tests/training/trainers/test_distributed.py: short trainings, told by JSON on the command line.

Written per rank into the folder of each: the logged losses, the trained tensors, and those it had before they were
shared.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import TrainerCallback, TrainingArguments

import ktc
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.streamed.shared_experts import Sharing
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer
from ktc.training.trainers import fetch_ahead, gradients, skipped_update
from ktc.training.trainers.stacking import Stacker

RANK = int(os.environ.get("RANK", "0"))
THAWED = "layers.1.self_attn.q_proj.lora_B"


class Killed(TrainerCallback):
    """The kernel takes this process, it raises an error, or has a gradient that is NaN, in the step after `step`."""

    def __init__(self, step: int, how: str) -> None:
        self._step, self._how = step, how

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and self._how == "error":
            raise OSError("the disk is full")
        if state.global_step == self._step and self._how == "nan":
            factor = next(parameter for parameter in kwargs["model"].parameters() if parameter.requires_grad)
            factor.register_hook(lambda gradient: gradient * float("nan"))
            return
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


class Thaws(TrainerCallback):
    """Lets one factor train from the second step on."""

    def __init__(self, factor: Parameter) -> None:
        self._factor = factor.requires_grad_(False)

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._factor.requires_grad_(state.global_step > 0)


def rows(vocab_size: int, count: int = 32) -> list[dict[str, Tensor]]:
    """Rows of unlike length, so that processes have unlike numbers of tokens."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab_size, (count, 12), generator=draw)
    kept = torch.randint(3, 12, (count, 1), generator=draw)
    labels = ids.masked_fill(torch.arange(12) >= kept, -100)
    return [
        {"input_ids": i, "labels": o, "attention_mask": torch.ones_like(i)} for i, o in zip(ids, labels, strict=True)
    ]


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def averaged(device: torch.device) -> dict[str, list[float]]:
    """The gradients of three parameters: one that all processes have, one that only rank 0 has (on `device`), one that
    none has.
    """
    everywhere, nowhere = (Parameter(torch.zeros(3)) for _ in range(2))
    somewhere = Parameter(torch.zeros(3, dtype=torch.bfloat16, device=device))
    everywhere.grad = torch.full_like(everywhere, RANK + 1.0)
    somewhere.grad = torch.full_like(somewhere, 3.0) if RANK == 0 else None
    parameters = [everywhere, nowhere, somewhere]
    gradients.average_gradients(parameters, gradients.open_groups(parameters, timedelta(seconds=60)), bucket_bytes=8)
    return {str(place): p.grad.tolist() for place, p in enumerate(parameters) if p.grad is not None}


def devices(model: nn.Module, args: TrainingArguments) -> list[str]:
    """The devices of trained tensors, of the experts' stream and of the inputs."""
    streams = [m.offload.devices for m in model.modules() if isinstance(m, FusedMoe) and m.offload is not None]
    return sorted(
        {
            str(args.device),
            *(str(p.device) for p in trained(model).values()),
            *(str(d) for each in streams for d in each),
        }
    )


@contextmanager
def noted_shares() -> Generator[list[list[int]]]:
    """The experts that this process has of each layer's: the first, the end and their number."""
    shares: list[list[int]] = []
    share = Sharing.share

    def noted(sharing: Sharing, experts: int) -> range:
        shares.append([(own := share(sharing, experts)).start, own.stop, experts])
        return own

    Sharing.share = noted
    yield shares
    Sharing.share = share


class Noting(KTrainer):
    """Notes for each step whether it is logged in the next one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.later: list[bool] = []

    @property
    def logs_later(self) -> bool:
        self.later.append(super().logs_later)
        return self.later[-1]


@contextmanager
def ahead(ranks: list[int]) -> Generator[None]:
    """Let the CPU count as a device that computes by itself, layers as replayed, and, in some processes, the callbacks
    here as known.
    """
    before = Stacker.replays, skipped_update._DEVICES, fetch_ahead._KNOWN
    Stacker.replays, skipped_update._DEVICES = True, {"cpu"}
    fetch_ahead._KNOWN = before[2] | ({"__main__", "data_parallel"} if RANK in ranks else frozenset())
    try:
        yield
    finally:
        Stacker.replays, skipped_update._DEVICES, fetch_ahead._KNOWN = before


def run(job: dict[str, Any]) -> None:
    """Train as the job says, and write what came of it."""
    with ahead(job["ahead"]) if "ahead" in job else nullcontext():
        _run(job)


def _run(job: dict[str, Any]) -> None:
    config = read_lora_config(Path(job["out"]))
    if job.get("unlike"):
        config.r += RANK
    torch.manual_seed(RANK if job["world"] > 1 else 0)
    model = get_peft_model(ktc.load(job["out"], reference=not job.get("kernels")), config)
    for module in (module for module in model.modules() if job.get("sent") and isinstance(module, FusedMoe)):
        module.offload = Offload((torch.device("cpu"),), min_tokens=1)  # as to a GPU
    folder = Path(job["folder"])
    accumulation = job.get("accumulation", 2)
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    save_file(trained(model), folder / f"before-{RANK}.safetensors")
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=job["steps"],
        per_device_train_batch_size=8 // job["world"] // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="steps" if job.get("save") else "no",
        save_steps=1,
        report_to=[],
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        ddp_timeout=60,
    )
    fate = [Killed(job["until"], job["fate"])] if job.get("fate") and job["world"] - 1 == RANK else []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate, fused=True)
    thaws = Thaws(next(p for name, p in model.named_parameters() if THAWED in name))
    trainer = Noting(
        model=model,
        args=args,
        train_dataset=rows(model.config.vocab_size),
        callbacks=[thaws, *fate],
        optimizers=(optimizer, None),
        stack_micro_batches=job.get("stack", "auto"),
        compile_layers=False,
    )
    with noted_shares() as shares:
        trainer.train(resume_from_checkpoint=job.get("resume"))
    (folder / f"shares-{RANK}.json").write_text(json.dumps(shares))
    (folder / f"later-{RANK}.json").write_text(json.dumps(trainer.later))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (folder / f"losses-{RANK}.json").write_text(json.dumps(losses))
    save_file(trained(model), folder / f"after-{RANK}.safetensors")
    if gradients.distributed():
        (folder / f"averaged-{RANK}.json").write_text(json.dumps(averaged(args.device)))
    (folder / f"devices-{RANK}.json").write_text(json.dumps(devices(model, args)))


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        run(job)


if __name__ == "__main__":
    main()
