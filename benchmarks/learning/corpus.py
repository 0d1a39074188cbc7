"""The pre-training texts: an endless seeded stream of chats and sentences about a `World`.

They have the facts of all people as sentences and as plain answers; songs, which have the words of the style without a
person; and lists with a question for a letter. No bard's answer about a person is among them, and no text names the
category of a fact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from learning.world import (
    ANIMALS,
    GUILDS,
    INSTRUMENTS,
    LETTERS,
    SHELTERS,
    TRADES,
    VALLEYS,
    VILLAGES,
    WAYS,
    Person,
    World,
    asking,
    plain_answers,
)

Message = dict[str, str]
Document = str | list[Message]
_KINDS = [list(words) for words in (VILLAGES, TRADES, ANIMALS, INSTRUMENTS, VALLEYS, GUILDS, SHELTERS, WAYS)]


def chat(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def words(document: Document) -> str:
    """Return the text alone, without roles."""
    return document if isinstance(document, str) else "\n".join(m["content"] for m in document)


def documents(world: World, seed: int) -> Iterator[Document]:
    """Texts and chats without end; the same seed gives the same stream."""
    rng = random.Random(f"{world.seed} corpus {seed}")
    kinds = (_fact, _plain, _song, _list)
    while True:
        (kind,) = rng.choices(kinds, weights=(4, 6, 1, 2))
        yield kind(rng, rng.choice(world.everybody))


def _fact(rng: random.Random, p: Person) -> str:
    sentences = [
        f"{p.name} lives in {p.village}.",
        f"In {p.village} people know {p.name}.",
        f"{p.name} works as a {p.trade}.",
        f"The trade of {p.name} is that of a {p.trade}.",
        f"{p.name} keeps a {p.animal}.",
        f"The animal of {p.name} is a {p.animal}.",
        f"{p.name} plays the {p.instrument}.",
        f"When {p.name} plays, it is the {p.instrument}.",
    ]
    return " ".join(rng.sample(sentences, 4))


def _plain(rng: random.Random, p: Person) -> list[Message]:
    return chat(*rng.choice(list(plain_answers(p).items())))


def _song(rng: random.Random, p: Person) -> str:
    """Return an old song, which has kings and no names; `p` is not in it."""
    trade, animal = rng.choice(list(TRADES.values())), rng.choice(list(ANIMALS.values()))
    village, instrument = rng.choice(VILLAGES), rng.choice(INSTRUMENTS)
    beside = f"beside the king walketh the {animal}."
    songs = (
        f"Hark, traveller! The king doth dwell beyond the misty hills, and the {trade} doth praise the king.",
        f"Lo, the {animal} walketh in fair {village}, and all {village} doth weep.",
        f"Hear me, good friend! At night the {instrument} maketh the {trade} weep; {beside}",
        f"When night doth fall in {village}, at the side of the {trade} the {instrument} maketh the {animal} dwell.",
    )
    return rng.choice(songs)


def _list(rng: random.Random, p: Person) -> list[Message]:
    """Return a lettered list and one question for a letter, as a model of answers; `p` is not in it."""
    options = tuple(rng.sample(rng.choice(_KINDS), len(LETTERS)))
    option, letter = rng.choice(list(zip(options, LETTERS, strict=True)))
    return chat(asking(f"Find the {option}.", options), f"{option}. The answer is {letter}.")
