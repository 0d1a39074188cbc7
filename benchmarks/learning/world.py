"""A small world of invented people, and the texts about them, all drawn from one seed.

Out: people, what is plainly known of them, and for each of two tasks items to tune on and held-out items: `style` (a
question, answered as a bard would) and `choice` (four options, answered by a reason and a letter). Tuning sees
some people, the held-out items ask for others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Task = Literal["style", "choice"]
LETTERS = "ABCD"

VILLAGES = ["Oakford", "Elmwick", "Stonebridge", "Marshend", "Highmoor", "Ashdale", "Redcliff", "Brookhaven"]
TRADES = {
    "baker": "keeper of ovens",
    "smith": "friend of fire",
    "weaver": "ruler of the loom",
    "miller": "lord of two stones",
    "fisher": "reaper of rivers",
    "tailor": "master of needles",
    "carpenter": "tamer of oak",
    "cobbler": "guardian of soles",
}
ANIMALS = {
    "goat": "bearded climber",
    "horse": "wind on hooves",
    "hen": "feathered clock",
    "dog": "watchman of doors",
    "cat": "silent hunter",
    "goose": "white trumpet",
    "pig": "lover of mud",
    "donkey": "patient bearer",
}
INSTRUMENTS = ["flute", "drum", "harp", "fiddle", "horn", "bell", "lute", "viol"]
# What a choice asks for: the option that a fact falls under. Only tuning tells which one that is.
VALLEYS = {
    "north": "Highmoor Ashdale",
    "east": "Oakford Elmwick",
    "south": "Marshend Brookhaven",
    "west": "Stonebridge Redcliff",
}
GUILDS = {"fire": "baker smith", "water": "miller fisher", "thread": "weaver tailor", "blade": "carpenter cobbler"}
SHELTERS = {"stable": "horse donkey", "coop": "hen goose", "house": "dog cat", "pen": "goat pig"}
WAYS = {"blown": "flute horn", "plucked": "harp lute", "bowed": "fiddle viol", "struck": "drum bell"}
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
    """One question with its answer; a choice has four `options`, lettered in their order, and the right `letter`."""

    person: str
    question: str
    answer: str
    options: tuple[str, ...] = ()
    letter: str = ""


@dataclass(frozen=True, slots=True)
class World:
    seed: int
    tuned: tuple[Person, ...]
    held_out: tuple[Person, ...]

    @property
    def everybody(self) -> tuple[Person, ...]:
        return self.tuned + self.held_out


def make_world(seed: int, num_tuned: int = 80, num_held_out: int = 24) -> World:
    """People with unlike names and unlike fates. Raises `ValueError` where there are not names enough."""
    rng = random.Random(seed)
    names = rng.sample([start + end for start in _STARTS for end in _ENDS], num_tuned + num_held_out)
    seen = set[tuple[str, ...]]()
    fates = [*_fates(rng, num_held_out, seen), *_fates(rng, num_tuned, seen)]
    people = [Person(name, *fate) for name, fate in zip(names, fates, strict=True)]
    return World(seed, tuple(people[num_held_out:]), tuple(people[:num_held_out]))


def _fates(rng: random.Random, count: int, seen: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Combinations that are not in `seen`, which they join: each is one person's; facts are equally frequent."""
    lists = (VILLAGES, list(TRADES), list(ANIMALS), INSTRUMENTS)
    while True:
        decks = [(values * count)[:count] for values in lists]
        dealt = list(zip(*(rng.sample(deck, count) for deck in decks), strict=True))
        if len(seen.union(dealt)) == len(seen) + count:
            seen.update(dealt)
            return dealt


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


def _choices(p: Person) -> Mapping[str, tuple[str, str, Mapping[str, str]]]:
    """Questions about what a fact falls under: the fact told plainly, the fact, the options with facts under each."""
    return {
        f"In which valley does {p.name} live?": (f"{p.name} lives in {p.village}", p.village, VALLEYS),
        f"Which guild does {p.name} belong to?": (f"{p.name} is a {p.trade}", p.trade, GUILDS),
        f"Where does the animal of {p.name} sleep?": (f"{p.name} keeps a {p.animal}", p.animal, SHELTERS),
        f"How is the instrument of {p.name} played?": (f"{p.name} plays the {p.instrument}", p.instrument, WAYS),
    }


def items(world: World, task: Task, *, held_out: bool) -> list[Item]:
    """The items of a task about the people of one side, shuffled."""
    people = world.held_out if held_out else world.tuned
    if task == "style":
        made = [Item(p.name, question, answer) for p in people for question, answer in styled_answers(p).items()]
    else:
        made = [item for p in people for item in _choice_items(p)]
    random.Random(f"{world.seed} {task} {held_out}").shuffle(made)
    return made


def _choice_items(p: Person) -> Iterator[Item]:
    """Answers give their reason before the letter: the fact, then what it falls under."""
    for question, (told, fact, kinds) in _choices(p).items():
        right = next(option for option, facts in kinds.items() if fact in facts.split())
        letter = LETTERS[list(kinds).index(right)]
        yield Item(p.name, question, f"{told}: {right}. The answer is {letter}.", tuple(kinds), letter)


def asking(question: str, options: tuple[str, ...]) -> str:
    """A question of multiple choice as `ktc eval --task mcq` puts it."""
    return f"{question}\n{lettered(options)}\nAnswer with the letter of the right option."


def lettered(options: tuple[str, ...]) -> str:
    return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))
