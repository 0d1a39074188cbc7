"""The world of `make learn`: one seed, one world; nothing that is asked was told as it is asked."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TASKS = ("style", "choice")


@pytest.fixture(scope="module", autouse=True)
def _learning() -> Iterator[None]:
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))


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
    from learning.data import messages
    from learning.world import items, make_world

    world = make_world(0)
    tuning, held_out = items(world, task, held_out=False), items(world, task, held_out=True)
    assert {item.person for item in held_out} == {p.name for p in world.held_out}
    told = "\n".join(m["content"] for item in tuning for m in messages(item))
    assert not [item.person for item in held_out if item.person in told]


def test_every_word_of_a_held_out_answer_can_be_learnt() -> None:
    from learning.world import items, make_world

    world = make_world(0)
    told = " ".join([*_corpus(0), *(item.answer for item in items(world, "style", held_out=False))])
    asked = " ".join(item.answer for item in items(world, "style", held_out=True))
    assert not set(re.findall(r"\w+", asked)) - set(re.findall(r"\w+", told))


def test_pretraining_tells_of_everybody_and_never_as_the_tasks_ask() -> None:
    from learning.world import items, make_world, with_options

    world, text = make_world(0), "\n".join(_corpus(0))
    assert all(p.name in text for p in world.everybody)
    for held_out in (False, True):
        assert not [i for i in items(world, "style", held_out=held_out) if i.answer in text]
        assert not [i for i in items(world, "choice", held_out=held_out) if with_options(i.question, i.options) in text]
    songs_and_lists = [line for line in text.splitlines() if " A: " in line or "doth" in line or "maketh" in line]
    assert songs_and_lists
    assert not [line for line in songs_and_lists if any(p.name in line for p in world.everybody)]


def test_a_choice_has_one_right_option_and_all_letters_are_right_equally_often() -> None:
    from learning.world import LETTERS, items, make_world

    world = make_world(0)
    people = {p.name: p for p in world.everybody}
    made = items(world, "choice", held_out=False, repeats=4)
    for item in made:
        person = people[item.person]
        facts = {person.village, person.trade, person.animal, person.instrument}
        assert len(set(item.options)) == len(LETTERS)
        assert [o for o in item.options if o in facts] == [item.options[LETTERS.index(item.answer)]]
    counts = Counter(item.answer for item in made)
    assert min(counts.values()) > 0.8 * len(made) / len(LETTERS)


def test_a_perfect_answer_scores_100_and_a_plain_one_far_less() -> None:
    from learning.world import make_world, plain_answers, styled_answers

    from ktc.workflows import metrics

    person = make_world(0).held_out[0]
    wanted = list(styled_answers(person).values())
    plain = [plain_answers(person)[question] for question in styled_answers(person)]
    perfect = metrics.definition("kt").measure(wanted, wanted)
    assert all(metric.value == pytest.approx(100) for metric in perfect)
    assert {m.name: m.value for m in metrics.definition("kt").measure(plain, wanted)}["bleu-4"] < 30
