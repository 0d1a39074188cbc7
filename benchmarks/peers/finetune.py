"""The peer: stock Hugging Face and PEFT with the whole model on one device, at several splits of the same step.

In: the same config, adapter, tokens and seed as ktc's rows. Out: a row per split, and the splits that ran out of
memory. Weights are random in any case: their values do not change the speed. Experts run by `grouped_mm`, the fastest
that stock has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from ktc.tools.bench.finetune.report import Row, Split, not_measured
from ktc.tools.bench.finetune.steps import row_of, token_ids
from ktc.tools.bench.machine import reset_peaks
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import LeftOut
from ktc.tools.bench.requests import Finetune
from ktc.tools.bench.rounds import StepClock
from ktc.tools.bench.stack import Stack

from .stock import stock_model

_BETWEEN: Final = 4  # the batch between one sequence and all of a step


def measured(
    request: Finetune, stack: Stack, lora: LoraConfig, sink: ProgressSink, device: str = "cuda:0"
) -> Iterator[Row | LeftOut]:
    """Yield a row or a reason for each split, the one that needs the least memory first."""
    try:
        model = _model(request, stack, lora, device, sink)
    except torch.OutOfMemoryError as error:
        yield not_measured(_first_line(error))
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4)
    for split in splits(request.accumulation):
        optimizer.zero_grad()
        reset_peaks()
        try:
            yield _row(model, optimizer, request, split, device, sink)
        except torch.OutOfMemoryError as error:
            yield not_measured(_first_line(error), str(split))


def splits(accumulation: int) -> tuple[Split, ...]:
    """Return the ways to compute a step that are tried, by the memory that they need."""
    found = [Split(1, accumulation), Split(accumulation, 1, checkpointing=True)]
    if accumulation % _BETWEEN == 0:
        found.append(Split(_BETWEEN, accumulation // _BETWEEN))
    return tuple(dict.fromkeys((*found, Split(accumulation, 1))))


def _model(request: Finetune, stack: Stack, lora: LoraConfig, device: str, sink: ProgressSink) -> PeftModel:
    model = stock_model(stack, device, request.seed, sink.part("weights of the peer"))
    torch.manual_seed(request.seed)
    return cast("PeftModel", get_peft_model(model, lora)).train()


def _row(
    model: PeftModel, optimizer: torch.optim.Optimizer, request: Finetune, split: Split, device: str, sink: ProgressSink
) -> Row:
    _checkpoint(model, split.checkpointing)
    ids = token_ids(request, int(cast("Any", model).config.vocab_size)).to(device)
    clock = StepClock(sink.steps(f"stock Hugging Face, {split}", request.steps))
    losses, norms = list[float](), list[float]()
    clock.start()
    for step in ids.view(request.steps, split.accumulation, split.batch, request.length):
        loss = torch.stack([_backward(model, batch, split) for batch in step]).sum()
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
        losses.append(float(loss))
        norms.append(float(norm))
    return row_of(
        request,
        clock.seconds,
        impl="hf",
        experts="resident",
        split=split,
        losses=tuple(losses),
        grad_norms=tuple(norms),
        phases={},
    )


def _backward(model: PeftModel, batch: Tensor, split: Split) -> Tensor:
    loss = cast("Any", model)(input_ids=batch, labels=batch).loss / split.accumulation
    loss.backward()
    return loss.detach()


def _checkpoint(model: PeftModel, wanted: bool) -> None:
    stock = cast("Any", model)
    stock.gradient_checkpointing_disable()
    if wanted:
        stock.gradient_checkpointing_enable({"use_reentrant": False})
        stock.enable_input_require_grads()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
