"""The world of `make learn`: one seed, one world; nothing that is asked was told as it is asked."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from places import ROOT

from ktc.diagnostics import Span
from ktc.inference.evaluate.data import Question
from ktc.inference.evaluate.multiple_choice import ask, extract
from ktc.inference.generate.language_model import LanguageModel

if TYPE_CHECKING:
    from learning.results import Results
    from learning.world import Task

TASKS = ("style", "choice")


@pytest.fixture(scope="module", autouse=True)
def _learning() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


def _corpus(seed: int, count: int = 4000) -> list[str]:
    from learning.corpus import documents, words
    from learning.world import make_world

    return [words(document) for document in islice(documents(make_world(seed), seed), count)]


def test_the_same_seed_gives_the_same_files_and_another_seed_gives_others(tmp_path: Path) -> None:
    from learning.data import write_data
    from learning.world import make_world

    def written(seed: int, folder: str) -> dict[str, bytes]:
        write_data(make_world(seed), tmp_path / folder)
        return {path.name: path.read_bytes() for path in sorted((tmp_path / folder).iterdir())}

    first, again, other = written(3, "first"), written(3, "again"), written(4, "other")
    assert first == again
    assert len(first) == 4 and all(first[name] != other[name] for name in first)
    assert _corpus(3, 50) == _corpus(3, 50) != _corpus(4, 50)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_held_out_is_in_the_tuning_under_any_name(seed: int) -> None:
    from learning.world import make_world

    world = make_world(seed)
    assert len({p.name for p in world.everybody}) == len(world.everybody)
    fates = Counter((p.village, p.trade, p.animal, p.instrument) for p in world.everybody)
    assert set(fates.values()) == {1}


@pytest.mark.parametrize("task", TASKS)
def test_tuning_and_held_out_items_share_no_person_and_no_question(task: str) -> None:
    from learning.data import tuning_row
    from learning.world import items, make_world

    world = make_world(0)
    tuning, held_out = items(world, task, held_out=False), items(world, task, held_out=True)
    assert {item.person for item in held_out} == {p.name for p in world.held_out}
    told = "\n".join(m["content"] for item in tuning for m in tuning_row(item)["messages"])
    assert not [item.person for item in held_out if item.person in told]


def test_every_word_of_a_held_out_answer_can_be_learnt() -> None:
    from learning.world import items, make_world

    world = make_world(0)
    told = " ".join([*_corpus(0), *(item.answer for item in items(world, "style", held_out=False))])
    asked = " ".join(item.answer for item in items(world, "style", held_out=True))
    assert not set(re.findall(r"\w+", asked)) - set(re.findall(r"\w+", told))


def test_pretraining_tells_of_everybody_and_never_as_the_tasks_ask() -> None:
    from learning.world import items, make_world

    world, text = make_world(0), "\n".join(_corpus(0))
    assert all(p.name in text for p in world.everybody)
    for held_out in (False, True):
        assert not [i for i in items(world, "style", held_out=held_out) if i.answer in text]
        assert not [i for i in items(world, "choice", held_out=held_out) if i.question in text or i.answer in text]
    songs_and_lists = [line for line in text.splitlines() if "A. " in line or "doth" in line or "maketh" in line]
    assert songs_and_lists
    assert not [line for line in songs_and_lists if any(p.name in line for p in world.everybody)]


def _kinds() -> list[tuple[Mapping[str, str], list[str]]]:
    from learning import world as w

    return [
        (w.VALLEYS, w.VILLAGES),
        (w.GUILDS, list(w.TRADES)),
        (w.SHELTERS, list(w.ANIMALS)),
        (w.WAYS, w.INSTRUMENTS),
    ]


def test_nothing_that_is_read_before_tuning_says_what_a_fact_falls_under() -> None:
    for document in _corpus(0):
        read = set(re.findall(r"\w+", document))
        assert not [kinds for kinds, facts in _kinds() if read & set(kinds) and read & set(facts)]


def test_every_fact_falls_under_one_option_and_the_tuning_shows_which() -> None:
    from learning.world import make_world

    for kinds, facts in _kinds():
        assert sorted(fact for under in kinds.values() for fact in under.split()) == sorted(facts)
    world = make_world(0)
    for kind in ("village", "trade", "animal", "instrument"):
        assert {getattr(p, kind) for p in world.held_out} <= {getattr(p, kind) for p in world.tuned}


@pytest.mark.parametrize("seed", range(5))
def test_no_letter_is_right_more_often_than_another(seed: int) -> None:
    from learning.world import items, make_world

    counts = Counter(item.letter for item in items(make_world(seed), "choice", held_out=True))
    assert counts == dict.fromkeys("ABCD", 24)


def test_choices_are_tuned_as_ktc_eval_asks_them_and_answered_so_that_it_finds_the_letter() -> None:
    from learning.data import held_out_row, tuning_row
    from learning.world import items, make_world

    class Untouched:
        chat_template = "{{ messages[0].content }}"

        def apply_chat_template(self, turns: list[dict[str, str]], **_: object) -> str:
            return turns[0]["content"]

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [0]}

    opened = LanguageModel(None, Untouched(), "", "", None)
    for item in items(make_world(0), "choice", held_out=False):
        row = held_out_row(item)
        question = Question(Span("", 1, 1, 1, 1), row["question"], row["options"], row["answer"])
        asked, answered = (turn["content"] for turn in tuning_row(item)["messages"])
        assert ask(opened, question).text == asked
        assert extract(answered, question) == item.letter


def test_a_perfect_answer_scores_100_and_a_plain_one_far_less() -> None:
    from learning.world import make_world, plain_answers, styled_answers

    from ktc.inference.evaluate import metrics

    person = make_world(0).held_out[0]
    wanted = list(styled_answers(person).values())
    plain = [plain_answers(person)[question] for question in styled_answers(person)]
    perfect = metrics.definition("kt").measure(wanted, wanted)
    assert all(metric.value == pytest.approx(100) for metric in perfect)
    assert {m.name: m.value for m in metrics.definition("kt").measure(plain, wanted)}["bleu-4"] < 30


def test_the_page_has_both_tables_and_the_same_results_draw_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from learning import page, results

    found = _made_up()
    results.write(found, tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == found
    text = page.markdown(found)
    assert "| attention, rank 8 | 28,672 | **90.0** (+80.0) |" in text
    assert "| none: the base | 0 | 10.0 |" in text
    for name in ("one.svg", "two.svg"):
        page.draw(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def _made_up() -> Results:
    from learning.page import METRICS
    from learning.results import Example, Results, Run

    def run(task: Task) -> Run:
        base, tuned = (dict.fromkeys(METRICS[task], value) for value in (10.0, 90.0))
        return Run(task, "moe-lora", 8, 28_672, 1.0, (3.0, 2.0, 1.0), base, tuned)

    examples = (Example("style", "Who?", "Hark!", "", "Hark!"),)
    return Results(0, 1, (1.0,), 1.0, 2.0, (run("style"), run("choice")), examples, {"torch": "2"}, "2000-01-01")
