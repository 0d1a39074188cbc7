"""Evaluation data: prompts with a reference, in the formats that `ktc train` reads, or multiple choice.

Input: a file. Output: frozen `Item`s or `Question`s with their lines. Refused, with all rows of a file together: data
that `ktc train` refuses (T5xx), text without a question and an answer and rows with tools or images (V801), and invalid
questions (V802).
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation.decode import read_json
from ktc.foundation.text_files import bounded
from ktc.inference.generate.prompts import Message, read_lines
from ktc.training.tune.examples import Example, read_training_data
from ktc.training.tune.settings import Format, column_faults

LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and its reference answer; `raw` texts are used without a chat template."""

    place: Span
    prompt: str | tuple[Message, ...]
    raw: bool
    reference: str


@dataclass(frozen=True, slots=True)
class Question:
    """Options have letters from A on; `answer` is the letter of the right one."""

    place: Span
    text: str
    options: tuple[str, ...]
    answer: str

    @property
    def letters(self) -> str:
        return LETTERS[: len(self.options)]


def read_items(
    path: Path, form: Format = "auto", limit: int | None = None, columns: Sequence[str] = ()
) -> tuple[Item, ...]:
    """Return the rows as prompts with references: the last answer of each is the reference.

    `columns` are words NAME=COLUMN. Raises InputRefused.
    """
    if faults := [Diagnostic("T503", fault, hint=hint) for fault, hint in column_faults(columns)]:
        raise InputRefused(*faults)
    data = read_training_data(path, form, columns=columns)
    if "text" in data.format.split(", "):
        message = f"`{path}` is text without questions and answers"
        hint = 'a row of a test is like {"prompt": "...", "completion": "..."}'
        raise InputRefused(Diagnostic("V801", message, hint=hint))
    examples = tuple(data.examples)[:limit]
    faults = [_tools_fault(example) for example in examples if _uses_tools(example)]
    faults += [_images_fault(example) for example in examples if any(turn.images for turn in example.turns)]
    if faults:
        raise InputRefused(*bounded(faults))
    return tuple(_item(example) for example in examples)


def _uses_tools(example: Example) -> bool:
    return bool(example.row.tools) or any(turn.calls_tools or turn.role == "tool" for turn in example.turns)


def _tools_fault(example: Example) -> Diagnostic:
    message = "the row has `tools`, calls of tools or their results, with which `ktc eval` does not ask"
    return Diagnostic("V801", message, example.place, hint="leave such rows out of the test")


def _images_fault(example: Example) -> Diagnostic:
    message = "the row has images, about which `ktc eval` does not ask"
    return Diagnostic("V801", message, example.place, hint="ask with `ktc generate --image FILE`, or `ktc serve`")


def _item(example: Example) -> Item:
    place = example.place
    last = max(at for at, turn in enumerate(example.turns) if turn.is_answer)
    before, answer = example.turns[:last], example.turns[last]
    if answer.role == "completion":
        return Item(place, "".join(turn.content for turn in before), True, answer.content)
    return Item(place, tuple(Message(turn.role, turn.content) for turn in before), False, answer.content)


def read_questions(path: Path, limit: int | None = None) -> tuple[Question, ...]:
    """Return the rows of a JSONL file of multiple choice. Raises InputRefused (V802; G705 for an unreadable file)."""
    questions, faults = list[Question](), list[Diagnostic]()
    for place, line in read_lines(path):
        try:
            questions.append(_question(read_json(line), place))
        except ValueError as error:
            hint = 'like {"question": "2 + 2?", "options": ["3", "4"], "answer": "B"}'
            faults.append(Diagnostic("V802", f"not a valid multiple-choice question: {error}", place, hint=hint))
    if faults:
        raise InputRefused(*bounded(faults))
    if not questions:
        raise InputRefused(Diagnostic("V802", f"`{path}` has no questions"))
    return tuple(questions[:limit])


def _question(value: object, place: Span) -> Question:
    """Decode one row. Raises ValueError with the fault."""
    fields: Mapping[str, Any] = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    missing = [name for name in ("question", "options", "answer") if name not in fields]
    if missing:
        raise ValueError(f"the row lacks {', '.join(f'`{name}`' for name in missing)}")
    text, options = fields["question"], _options(fields["options"])
    if not isinstance(text, str) or not text.strip():
        raise ValueError("`question` is not a text, or empty")
    return Question(place, text, options, _letter(fields["answer"], options))


def _options(value: object) -> tuple[str, ...]:
    """Return the options from a list of texts, or from an object with the keys A, B, C and so on."""
    if isinstance(value, dict):
        lettered = cast("dict[str, object]", value)
        if list(lettered) != list(LETTERS[: len(lettered)]):
            raise ValueError("the keys of `options` are A, B, C and so on, in that order")
        listed = list(lettered.values())
    else:
        listed = cast("list[object]", value) if isinstance(value, list) else []
    texts = [option for option in listed if isinstance(option, str) and option.strip()]
    if len(texts) != len(listed) or not 2 <= len(texts) <= len(LETTERS):
        raise ValueError(f"`options` must be a list of 2 to {len(LETTERS)} texts")
    if len(set(texts)) != len(texts):
        raise ValueError("two of the `options` are equal")
    return tuple(texts)


def _letter(value: object, options: tuple[str, ...]) -> str:
    """Return the letter of an answer: a letter, a number from 0, or the text of an option."""
    letters = LETTERS[: len(options)]
    if type(value) is int and 0 <= value < len(options):
        return letters[value]
    if isinstance(value, str) and len(value.strip()) == 1 and value.strip().upper() in letters:
        return value.strip().upper()
    if isinstance(value, str) and value in options:
        return letters[options.index(value)]
    raise ValueError(f"`answer` must be an option: a letter up to {letters[-1]}, a number from 0, or its text")
