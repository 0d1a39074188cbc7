"""The steps of a compiled model: an optimizer step by `KTrainer`, or a prompt and the steps of `generate`."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from peft import get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ktc.model.loading import peft_glue
from ktc.model.loading.load import load
from ktc.stages.capture import CapturedModel
from ktc.stages.cost import Use
from ktc.tools.bench.finetune.steps import measured
from ktc.tools.bench.plans.kinds import KindClock, TimedSteps, modules_of
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.requests import Finetune
from ktc.tools.bench.rounds import StepClock

_UNCOUNTED: Final = 3  # first steps of a text
_PROMPTS, _FIRST_PROMPTS = 6, 3  # the first ones of a process are slower: memory is taken, weights are page-locked
_FIRST_TOKEN: Final = 3
_HOOKED: Final = 4  # calls or steps in which kinds of modules are timed


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a use: the median of its calls, their interquartile range as a share, and those of each kind."""

    use: Use
    seconds: float
    spread: float
    kinds: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How often and on which weights calls are measured, and of which plan. A `seed` of None reads the checkpoint."""

    steps: int
    seed: int | None
    name: str = "the plan"


def times_of(
    out: Path, captured: CapturedModel, uses: tuple[Use, ...], sizes: Sizes, sink: ProgressSink
) -> tuple[Times, ...]:
    """Load the compiled model `out` and return the times of each use. Raises what loading and the calls raise."""
    model: PreTrainedModel = load(out, random_weights=sizes.seed, progress=sink.part("weights"))
    try:
        if uses[0].trains:
            return tuple(_step(out, model, captured, use, sizes, sink) for use in uses)
        prompt, decode = uses
        return _answer(model, captured, prompt, decode, sizes)
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _step(
    out: Path, base: PreTrainedModel, captured: CapturedModel, use: Use, sizes: Sizes, sink: ProgressSink
) -> Times:  # fmt: skip
    lora = peft_glue.read_lora_config(out)
    lora.lora_dropout = 0.0
    tuned = cast("Any", get_peft_model(base, lora))
    request = Finetune(
        model=str(out),
        random_weights=True,
        length=use.length,
        accumulation=use.batch,
        steps=sizes.steps + _HOOKED,
    )
    timed = TimedSteps(KindClock(modules_of(captured, base)), sizes.steps)
    row = measured(tuned, request, "gpu", out.parent / f"run-{use.batch}", sink, sizes.name, [timed])
    seconds = row.step_times[1 : sizes.steps]  # in the first, memory is allocated and functions are compiled
    tuned.unload()
    return Times(use, statistics.median(seconds), spread_of(seconds), timed.medians)


def _answer(
    model: PreTrainedModel, captured: CapturedModel, prompt: Use, decode: Use, sizes: Sizes
) -> tuple[Times, ...]:
    vocabulary = int(captured.model.config.vocab_size)
    ids = torch.randint(_FIRST_TOKEN, vocabulary, (prompt.batch, prompt.length))
    ids = ids.to(_device_of(model))
    prompts, steps = list[float](), list[float]()
    for _ in range(_PROMPTS):
        clock = StepClock()
        clock.start()
        _generate(model, ids, sizes.steps, clock)
        prompts.append(clock.seconds[0])
        steps += clock.seconds[_UNCOUNTED:]
    with torch.no_grad():
        kinds = _hooked_calls(lambda: cast("Any", model)(ids, logits_to_keep=1), modules_of(captured, model))
    warm = prompts[_FIRST_PROMPTS:]
    first = Times(prompt, statistics.median(warm), spread_of(warm), kinds)
    return first, Times(decode, statistics.median(steps), spread_of(steps))


def _hooked_calls(call: Callable[[], object], kinds: Mapping[str, list[nn.Module]]) -> dict[str, float]:
    clock = KindClock(kinds)
    clock.attach()
    try:
        for _ in range(_HOOKED):
            call()
            clock.end_round()
    finally:
        clock.detach()
    return clock.medians


def _generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, clock: StepClock) -> None:
    from ktc.tools.bench.generate import Tokens

    cast("Any", model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=Tokens(clock),
    )


def spread_of(seconds: Any) -> float:
    """Return the interquartile range of seconds as a share of their median, 0 for fewer than two."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / statistics.median(seconds)


def _device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of the model's input."""
    return cast("Any", model).get_input_embeddings().weight.device
