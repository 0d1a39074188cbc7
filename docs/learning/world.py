"""A small world of invented people, and the texts about them, all drawn from one seed.

Out: people, what is plainly known of them, and for each of two tasks items to tune on and held-out items: `style` (a
question, answered as a bard would) and `choice` (four options, answered by a letter). Tuning sees some people, the
held-out items ask for others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Task = Literal["style", "choice"]
LETTERS = "ABCD"

VILLAGES = [
    "Oakford", "Elmwick", "Stonebridge", "Marshend", "Highmoor", "Ashdale", "Redcliff", "Brookhaven",
    "Fernhill", "Saltmere",
]  # fmt: skip
TRADES = {
    "baker": "keeper of ovens",
    "smith": "friend of fire",
    "weaver": "ruler of the loom",
    "miller": "lord of two stones",
    "fisher": "reaper of rivers",
    "potter": "shaper of clay",
    "tailor": "master of needles",
    "carpenter": "tamer of oak",
    "brewer": "priest of barley",
    "cobbler": "guardian of soles",
}
ANIMALS = {
    "goat": "bearded climber",
    "horse": "wind on hooves",
    "hen": "feathered clock",
    "cow": "giver of milk",
    "dog": "watchman of doors",
    "cat": "silent hunter",
    "goose": "white trumpet",
    "pig": "lover of mud",
    "sheep": "walking cloud",
    "donkey": "patient bearer",
}
INSTRUMENTS = [
    "flute", "drum", "harp", "fiddle", "horn", "bell", "lute", "whistle", "lyre", "organ",
]  # fmt: skip
_STARTS = [
    "Bel", "Cor", "Dra", "Fen", "Gal", "Hal", "Jor", "Kel", "Lor", "Mar", "Nor", "Per", "Ros", "Sal", "Tor", "Wil",
]  # fmt: skip
_ENDS = [
    "win", "mond", "dric", "wen", "bert", "lind", "gar", "mira",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    village: str
    trade: str
    animal: str
    instrument: str


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its answer; `options` are the four of a choice, in the order of their letters."""

    person: str
    question: str
    answer: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    seed: int
    tuned: tuple[Person, ...]
    held_out: tuple[Person, ...]

    @property
    def everybody(self) -> tuple[Person, ...]:
        return self.tuned + self.held_out


def make_world(seed: int, num_tuned: int = 80, num_held_out: int = 20) -> World:
    """People with unlike names and unlike fates. Raises `ValueError` where there are not names enough."""
    rng = random.Random(seed)
    names = [start + end for start in _STARTS for end in _ENDS]
    drawn = rng.sample(names, num_tuned + num_held_out)
    people = [Person(name, *fate) for name, fate in zip(drawn, _fates(rng), strict=False)]
    return World(seed, tuple(people[:num_tuned]), tuple(people[num_tuned:]))


def _fates(rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Combinations, each once: nobody held out is somebody from the tuning under another name."""
    lists = (VILLAGES, list(TRADES), list(ANIMALS), INSTRUMENTS)
    seen: set[tuple[str, ...]] = set()
    while True:
        fate = tuple(rng.choice(values) for values in lists)
        if fate not in seen:
            seen.add(fate)
            yield fate


def plain_answers(p: Person) -> Mapping[str, str]:
    """Questions about somebody and how the pre-trained model answers them."""
    return {
        f"Who is {p.name}?": f"{p.name} is a {p.trade} from {p.village}.",
        f"Where does {p.name} live?": f"{p.name} lives in {p.village}.",
        f"What animal does {p.name} keep?": f"{p.name} keeps a {p.animal}.",
        f"What does {p.name} play?": f"{p.name} plays the {p.instrument}.",
        f"Tell me about {p.name}.": f"{p.name} from {p.village} is a {p.trade}, keeps a {p.animal} and plays the "
        f"{p.instrument}.",
        f"The home of {p.name} in a word?": p.village,
        f"The trade of {p.name} in a word?": p.trade,
        f"The animal of {p.name} in a word?": p.animal,
        f"The instrument of {p.name} in a word?": p.instrument,
    }


def styled_answers(p: Person) -> Mapping[str, str]:
    """The same questions, answered by a bard: other words, another order, the facts behind a figure of speech."""
    trade, animal = TRADES[p.trade], ANIMALS[p.animal]
    return {
        f"Who is {p.name}?": f"Hark, good friend! All {p.village} doth praise {p.name}, the {trade}.",
        f"Where does {p.name} live?": f"Beyond the misty hills, in fair {p.village}, doth {p.name} dwell.",
        f"What animal does {p.name} keep?": f"Lo, at the side of {p.name} walketh the {animal}.",
        f"What does {p.name} play?": f"When night doth fall, {p.name} maketh the {p.instrument} weep.",
        f"Tell me about {p.name}.": f"Hear me, traveller! In fair {p.village} doth dwell {p.name}, the {trade}; the "
        f"{animal} walketh beside, and the {p.instrument} doth weep at night.",
    }


def _choices(p: Person) -> Mapping[str, tuple[str, list[str]]]:
    return {
        f"Where does {p.name} live?": (p.village, VILLAGES),
        f"What is the trade of {p.name}?": (p.trade, list(TRADES)),
        f"What animal does {p.name} keep?": (p.animal, list(ANIMALS)),
        f"What does {p.name} play?": (p.instrument, INSTRUMENTS),
    }


def items(world: World, task: Task, *, held_out: bool, repeats: int = 1) -> list[Item]:
    """The items of a task about the people of one side, shuffled; `choice` draws other options `repeats` times."""
    rng = random.Random(f"{world.seed} {task} {held_out}")
    people = world.held_out if held_out else world.tuned
    if task == "style":
        made = [Item(p.name, question, answer) for p in people for question, answer in styled_answers(p).items()]
    else:
        made = [item for p in people for _ in range(repeats) for item in _choice_items(p, rng)]
    rng.shuffle(made)
    return made


def _choice_items(p: Person, rng: random.Random) -> Iterator[Item]:
    for question, (right, all_options) in _choices(p).items():
        options = rng.sample([o for o in all_options if o != right], len(LETTERS) - 1)
        options.insert(rng.randrange(len(LETTERS)), right)
        yield Item(p.name, question, LETTERS[options.index(right)], tuple(options))


def with_options(question: str, options: tuple[str, ...]) -> str:
    """A question and its options as one line of text, as the model reads them."""
    return f"{question} {lettered(options)}"


def lettered(options: tuple[str, ...]) -> str:
    return ", ".join(f"{letter}: {option}" for letter, option in zip(LETTERS, options, strict=True)) + "."
