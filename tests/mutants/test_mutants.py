"""The mutants are many enough, cover every feature, and a sample of them is noticed."""

from __future__ import annotations

import pytest

from mutants import MUTANTS, source
from mutants.models import FEATURES, MODELS
from mutants.mutant import Mutant, NoChange, verdict

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLE = (
    "limit 7.0 -> 7.01 in the first layer", "offset dropped", "bias of down dropped", "wrong without gradients alone",
    "NaN removed", "layers with other limits treated as one",
    "activation gelu -> its tanh form",
)  # fmt: skip


def test_there_are_enough_mutants_of_enough_models() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.model for mutant in MUTANTS}) >= 8
    assert len({(mutant.kind, mutant.model, mutant.name) for mutant in MUTANTS}) == len(MUTANTS)
    used = {mutant.model for mutant in MUTANTS}
    assert used <= set(MODELS)
    assert all(set(models) & used for models in FEATURES.values())


def _sampled() -> list[Mutant]:
    found = [m for m in MUTANTS if m.name in SAMPLE and m.model in ("basalt", "slopes")]
    return sorted(found, key=lambda m: m.model)


@pytest.mark.parametrize("mutant", _sampled(), ids=lambda m: f"{m.model}-{m.name}")
def test_a_sample_is_noticed(mutant: Mutant) -> None:
    assert verdict(mutant).by


def test_a_change_of_nothing_is_an_error_of_the_mutant() -> None:
    with pytest.raises(NoChange):
        verdict(Mutant("nothing", "slopes", "recipe", lambda rows: rows))


def test_every_seeded_bug_can_still_be_applied() -> None:
    assert [problem for bug in source.MUTANTS if (problem := source.problem_of(bug))] == []
