"""Every model of the zoo, compiled, equals its stock model, or its experts stay as they are with a reason.

A family and its near-twin differ in one line. A test on the stock models alone shows that the line matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from invented.compared import compare, difference
from invented.family import FAMILIES as FILES
from invented.family import Case, Family
from invented.surroundings import code_of_models_below
from invented.written import stock, write
from invented.zoo import CASES, FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = frozenset({"layer_parity", "stacked_loop", "plain_list"})


@pytest.fixture(scope="module", autouse=True)
def _code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with code_of_models_below(tmp_path_factory.mktemp("modules")):
        yield


def _sample(cases: tuple[Case, ...]) -> list[object]:
    return [pytest.param(case, id=case.name, marks=() if case.name in QUICK else (pytest.mark.full,)) for case in cases]


@pytest.mark.parametrize("case", _sample(CASES))
def test_a_compiled_model_equals_stock_or_its_experts_stay_as_they_are(case: Case, tmp_path: Path) -> None:
    found = compare(case, tmp_path)
    assert found.faults == []
    assert case.is_met_by(found.outcome, found.attention), (found.outcome, found.attention)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_near_twin_computes_something_else(family: Family, tmp_path: Path) -> None:
    folders = [write(case, tmp_path / case.name) for case in (Case(family, True), Case(family, False))]
    errors = [difference(*(stock(f, dtype) for f in folders)) for dtype in (torch.float32, torch.bfloat16)]
    assert max(errors) > 1e-4


def test_every_file_of_a_family_has_a_row() -> None:
    assert sorted(family.name for family in FAMILIES) == sorted(file.stem for file in FILES.glob("*.py"))
    assert all(family.near_code != family.code for family in FAMILIES)
