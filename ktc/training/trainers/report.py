"""`KTReport`: a callback that measures a run of any HF Trainer and writes `ktc_report.json` into its output folder.

In: a trainer (`watch`) and its callbacks. Out: a `RunReport`. With several processes each measures itself; tokens are
counted over all, and only the first process writes.
"""

from __future__ import annotations

import json
import platform
import resource
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ktc.foundation import host, versions
from ktc.foundation.files import write_file
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.streamed.stream_ring import StreamFigures, rings
from ktc.model.kernels.sent_values import SentValues
from ktc.model.linears.lora_linear import FusedLinear
from ktc.training.trainers import run_report
from ktc.training.trainers.phases import PhaseClock, StepTimes
from ktc.training.trainers.private_api import observe_steps
from ktc.training.trainers.run_report import DeviceMemory, Logged, RunReport, StepTokens

_PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")
_IGNORED = -100
_RECENT = 5


class KTReport(TrainerCallback):
    """A callback for a trainer that it `watch`es. `report` has the measurements so far, also after an interrupt."""

    def __init__(self) -> None:
        self._clock = PhaseClock()
        self._open = ExitStack()
        self._steps: list[StepTimes] = []
        self._tokens: list[StepTokens] = []
        self._fetched = _Counted(())
        self._began = self._seconds = 0.0
        self._length = 0
        self._trainer: Any = None
        self._streams: dict[str, StreamFigures] = {}  # after the first step
        self._streaming_began = 0.0

    def watch(self, trainer: Any) -> None:
        """Time the trainer's fetching and backward passes."""
        self._trainer = trainer
        trainer.phase_clock = self._clock
        observe_steps(trainer, self._clock.fetching, self._count, self._clock.backward)

    def _count(self, batches: Any) -> None:
        self._fetched = _Counted(batches)

    # The trainer's callbacks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
        self._length = int(getattr(args, "max_length", None) or getattr(args, "cutoff_len", None) or 0)
        self._open.close()
        experts = [module for module in cast("nn.Module", kwargs["model"]).modules() if isinstance(module, FusedMoe)]
        self._open.enter_context(self._clock.running(experts))
        for hook in (hook for module in experts for hook in self._clock.around(module)):
            self._open.callback(hook.remove)
        self._began = time.perf_counter()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._clock.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._steps.append(self._clock.end())
        self._tokens.append(self._fetched.tokens())
        if len(self._steps) == 1:
            self._streams, self._streaming_began = _figures(), time.perf_counter()
        self._seconds = time.perf_counter() - self._began

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._open.close()
        self._seconds = time.perf_counter() - self._began
        report = self.report(finished=state.global_step >= state.max_steps)
        if state.is_world_process_zero:
            write_report(Path(str(args.output_dir)), report)

    def end(self) -> None:
        """End the measurements of a run that ends without a step."""
        self._open.close()

    def recent_speed(self) -> float:
        """Return the real tokens per second of this process over the last steps, 0 before the first."""
        steps, tokens = self._steps[-_RECENT:], self._tokens[-_RECENT:]
        seconds = sum(step.seconds for step in steps)
        return sum(step.real for step in tokens) / seconds if seconds else 0.0

    def report(self, *, finished: bool) -> RunReport:
        """Return the measurements until now. With several processes, all of them must call this together."""
        trainer = self._trainer
        args, state, model = trainer.args, trainer.state, trainer.accelerator.unwrap_model(trainer.model)
        experts = [module for module in model.modules() if isinstance(module, FusedMoe)]
        processes = int(args.world_size)
        sequences = int(args.per_device_train_batch_size) * int(args.gradient_accumulation_steps) * processes
        trainable, total = _parameters(model)
        return RunReport(
            model=str(getattr(model.config, "name_or_path", "")),
            steps=int(state.global_step),
            epochs=float(state.epoch or 0.0),
            seconds=self._seconds,
            finished=finished,
            speed=run_report.speed(self._steps, _of_all_processes(self._tokens, processes), sequences * self._length),
            phases=run_report.phases(self._steps),
            experts=run_report.experts(self._steps, gated=all(module.form.gated for module in experts)),
            gpus=tuple(_gpus()),
            host_peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            trainable_parameters=trainable,
            total_parameters=total,
            processes=processes,
            micro_batch=int(args.per_device_train_batch_size),
            accumulation=int(args.gradient_accumulation_steps),
            length=self._length,
            stacking=str(getattr(getattr(trainer, "stacker", None), "decision", None) or ""),
            linears=_linears(model),
            history=tuple(_history(state.log_history)),
            machine=_machine(),
            versions=_versions(),
            streams=self._traffic(),
            offload=", ".join(dict.fromkeys(str(module.offload) for module in experts if module.offload)),
            expert_adapters=str(getattr(trainer, "expert_adapters", "")),
        )

    def _traffic(self) -> tuple[run_report.StreamTraffic, ...]:
        """Return the traffic of weights since the first step."""
        steps, seconds = len(self._steps) - 1, time.perf_counter() - self._streaming_began
        if steps < 1:
            return ()
        pairs = ((self._streams.get(device), after) for device, after in _figures().items())
        return tuple(run_report.traffic(before, after, steps, seconds) for before, after in pairs if before)


def _figures() -> dict[str, StreamFigures]:
    return {figures.device: figures for figures in (ring.figures() for ring in rings())}


def write_report(folder: Path, report: RunReport) -> None:
    """Write `ktc_report.json` into the folder, and replace an existing one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / run_report.FILE, json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n")


def report_of(trainer: Any) -> KTReport:
    """Return the trainer's own report, or a new one that watches the trainer."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, KTReport):
            return callback
    report = KTReport()
    trainer.add_callback(report)
    report.watch(trainer)
    return report


class _Counted:
    """The tokens of a step's micro-batches. A batch without a mask has no padding.

    A GPU counts its own, and the host reads them behind the step: a wait for each would precede its work.
    """

    def __init__(self, batches: Any) -> None:
        self._real = self._padded = 0
        real, learned = defaultdict[torch.device, list[Tensor]](list), defaultdict[torch.device, list[Tensor]](list)
        for batch in batches:
            if not isinstance(batch, Mapping):
                continue  # rows that the trainer tokenises itself
            ids, mask, labels = (
                cast("Mapping[str, Any]", batch).get(key) for key in ("input_ids", "attention_mask", "labels")
            )
            if not isinstance(ids, Tensor):
                continue
            self._padded += ids.numel()
            if isinstance(mask, Tensor) and mask.shape == ids.shape:
                real[mask.device].append((mask != 0).sum())
            else:
                self._real += ids.numel()
            if isinstance(labels, Tensor):
                learned[labels.device].append((labels != _IGNORED).sum())
        self._of_masks = [SentValues(torch.stack(counts)) for counts in real.values()]
        self._of_labels = [SentValues(torch.stack(counts)) for counts in learned.values()]

    def tokens(self) -> StepTokens:
        """Return their numbers."""
        real, learned = (sum(sum(sent.read()) for sent in of) for of in (self._of_masks, self._of_labels))
        return StepTokens(self._real + real, self._padded, learned)


def _of_all_processes(tokens: list[StepTokens], processes: int) -> list[StepTokens]:
    if processes == 1 or not tokens:
        return tokens
    import torch.distributed as dist

    table = [[step.real, step.padded, step.learned] for step in tokens]
    gathered: list[Any] = [None] * processes
    dist.all_gather_object(gathered, table)
    return [StepTokens(*(sum(column) for column in zip(*rows, strict=True))) for rows in zip(*gathered, strict=True)]


def _linears(model: nn.Module) -> str:
    """Describe the product of frozen linear layers with many rows, "" where PyTorch's was the only one."""
    products = {
        module.prefill_kernel
        for module in model.modules()
        if isinstance(module, FusedLinear) and module.prefill_kernel is not None
    }
    return "; ".join(sorted({product.description() for product in products}))


def _parameters(model: nn.Module) -> tuple[int, int]:
    """Count the trainable parameters, and all of them as the stock model does, with packed experts and the adapter."""
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    return trainable, total + sum(module.num_parameters() for module in model.modules() if isinstance(module, FusedMoe))


def _gpus() -> list[DeviceMemory]:
    """Return the GPUs on which memory is or was allocated."""
    return [
        DeviceMemory(f"cuda:{number}", torch.cuda.max_memory_allocated(number), reserved)
        for number in range(torch.cuda.device_count())
        if (reserved := torch.cuda.max_memory_reserved(number))
    ]


def _history(log: list[dict[str, float]]) -> list[Logged]:
    names = ("loss", "eval_loss", "learning_rate", "grad_norm", "rewards/margins")
    return [
        Logged(int(entry["step"]), *(float(entry[name]) if name in entry else None for name in names))
        for entry in log
        if "loss" in entry or "eval_loss" in entry
    ]


def _machine() -> dict[str, str]:
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        "cpu": host.cpu_name(),
        "threads": str(host.usable_threads()),
        "gpus": ", ".join(gpus),
        "system": platform.platform(),
    }


def _versions() -> dict[str, str]:
    installed = {name: version for name in _PACKAGES if (version := versions.installed(name))}
    return {"ktc": versions.__version__, "python": platform.python_version(), **installed}
