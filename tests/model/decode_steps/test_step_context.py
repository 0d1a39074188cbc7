"""The context of a step: one per model, whose fields no other model and no other thread reads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ktc
from ktc.model.decode_steps.cuda_graph import DecodeGraphs
from ktc.model.kernels.step_context import StepContext


@pytest.fixture
def models(inference_twin: Callable[[str], Path]) -> list[Any]:
    return [ktc.load(inference_twin("olmoe")) for _ in range(2)]


def generated(model: Any, ids: Tensor) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)


def test_models_that_decode_in_threads_record_their_own_calls(
    models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads record at once, and a third one calls the first model while it is recorded."""
    prompts = [torch.randint(3, models[0].config.vocab_size, (1, length)) for length in (9, 17)]
    wanted = [generated(model, ids) for model, ids in zip(models, prompts, strict=True)]
    for model in models:
        model.decode_graphs.clear()
    both, called = threading.Barrier(2, timeout=60), list[bool]()
    record, compute_in_turns = models[0].decode_graphs.recorder.record, threading.local()

    def recorded(compute: Any, *given: Any) -> Any:
        def at_once() -> Any:
            if not hasattr(compute_in_turns, "met"):
                compute_in_turns.met = True
                both.wait()
                assert given[-1].recorder is not None
            found = compute()
            other = threading.Thread(target=lambda: called.append(given[-1].recorder is None))
            other.start()
            other.join()
            return found

        return record(at_once, *given)

    for model in models:
        recorder = replace(model.decode_graphs.recorder, record=recorded)
        monkeypatch.setattr(model, "decode_graphs", DecodeGraphs(recorder))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generated, models, prompts))
    assert all(map(torch.equal, found, wanted))
    assert len(called) >= 2 and all(called)
    assert all(model.decode_graphs._steps for model in models), "no recording has failed"


def test_a_model_has_one_context_and_its_copy_another(models: list[Any]) -> None:
    contexts = [
        {id(vars(module)["step_context"]) for module in model.modules() if "step_context" in vars(module)}
        for model in (*models, copy.deepcopy(models[0]))
    ]
    assert [len(each) for each in contexts] == [1, 1, 1]
    assert len(set.union(*contexts)) == 3


def test_a_field_is_that_of_its_thread_and_ends_with_its_block() -> None:
    context, seen = StepContext(), list[bool]()
    with context.entered(reads_prompt=True):
        with context.entered(reads_prompt=False, recorder=print):
            assert (context.reads_prompt, context.recorder) == (False, print)
        thread = threading.Thread(target=lambda: seen.append(context.reads_prompt))
        thread.start()
        thread.join()
        assert (context.reads_prompt, context.recorder) == (True, None)
        assert not pickle.loads(pickle.dumps(context)).reads_prompt
    assert (context.reads_prompt, seen) == (False, [False])


def test_modules_that_come_later_take_the_context_of_the_model() -> None:
    model, later = nn.Sequential(nn.Identity()), nn.Identity()
    context, later.step_context = StepContext.of(model), StepContext()
    model.append(later)
    assert StepContext.given_to(model) is context is later.step_context
