"""A compiled model trains as its stock model does with every option of the trainers, alone and in pairs.

`make trainer-options` prints the table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer_options.cases import CASES, Case, unclassified
from trainer_options.option import Tried, Untried
from trainer_options.runs import Models, compare
from trainer_options.trainers import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = frozenset({
    "trainer:label_smoothing_factor=0.1", "trainer:neftune_noise_alpha=5.0 stacked", "sft:loss_type='dft'",
    "dpo:loss_type='ipo'",
})  # fmt: skip


@pytest.fixture(scope="module")
def models(compiled_twin: Callable[..., Path]) -> Iterator[Models]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Models.of(compiled_twin("tiny:qwen3_moe", "moe-lora"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_arguments_is_classified(kind: str) -> None:
    assert unclassified(KINDS[kind]) == set()
    assert all(option.reason for option in KINDS[kind].options.values() if isinstance(option, Untried))


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_every_loss_that_a_library_describes_is_tried(kind: str) -> None:
    described = next(f for f in dataclasses.fields(KINDS[kind].arguments) if f.name == "loss_type").metadata["help"]
    options = [option for name, option in KINDS[kind].options.items() if name.startswith("loss_type")]
    values = {str(value) for option in options if isinstance(option, Tried) for value in option.values}
    assert set(re.findall(r"(?<!=)'(\w+)'", described)) <= values


def _sample(cases: tuple[Case, ...]) -> list[object]:
    quick = [case for case in cases if case.id in QUICK]
    assert len(quick) == len(QUICK), "a case of the quick tests has another name"
    return [pytest.param(case, id=case.id, marks=() if case in quick else (pytest.mark.full,)) for case in cases]


@pytest.mark.parametrize("case", _sample(CASES))
def test_a_compiled_model_trains_as_its_stock_model(case: Case, models: Models) -> None:
    rows = compare(case, models)
    assert [str(row) for row in rows if not row.right] == []
