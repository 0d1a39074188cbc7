"""Multiple-choice questions: answered by the generated letter, or by the letter with the highest likelihood.

Input: `Question`s. Output: the letter chosen for each, "" for none. Accuracy is the share of right letters. Token
accuracy, the share of reference tokens that the model ranks first, is a different number and never called accuracy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ktc.inference.evaluate.data import Question
from ktc.inference.evaluate.likelihood import continuations, likelihoods
from ktc.inference.generate.answers import answer_all
from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.generate.prompts import Prompt, render
from ktc.inference.generate.sampling import Sampling

By = Literal["text", "logprob"]
DEFINITIONS: dict[By, str] = {
    "text": "accuracy: the letter extracted from the generated text is the right one (exact match); no letter is wrong",
    "logprob": "accuracy: of the letters, the right one has the highest log likelihood after the prompt",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The letter chosen ("": none), and its basis: the text, or the log likelihood of each letter."""

    letter: str
    text: str = ""
    logs: tuple[float, ...] = ()


def ask(opened: LanguageModel, question: Question, *, system: str = "", raw: bool = False) -> Prompt:
    """Return the prompt: the question, its lettered options, and the instruction. A raw prompt ends with `Answer:`."""
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(question.letters, question.options, strict=True))
    plain = raw or not opened.has_template
    end = "Answer:" if plain else "Answer with the letter of the right option."
    return render(opened, f"{question.text}\n{options}\n{end}", system=system, raw=plain, place=question.place)


def choose(
    opened: LanguageModel,
    questions: Sequence[Question],
    prompts: Sequence[Prompt],
    by: By,
    sampling: Sampling,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
) -> list[Choice]:
    """Return one choice per question."""
    if by == "text":
        answers, _ = answer_all(opened, prompts, sampling, batch_size, progress)
        pairs = zip(questions, answers, strict=True)
        return [Choice(extract(answer.text, question), answer.text) for question, answer in pairs]
    chosen: list[Choice] = []
    for question, prompt in zip(questions, prompts, strict=True):
        chosen.append(_likeliest(opened, question, prompt, batch_size))
        if progress is not None:
            progress(len(chosen))
    return chosen


def _likeliest(opened: LanguageModel, question: Question, prompt: Prompt, batch_size: int) -> Choice:
    """Return the first of the most probable letters. After `Answer:` a letter follows a space."""
    space = " " if prompt.text.endswith("Answer:") else ""
    pairs = continuations(opened.tokenizer, prompt, [space + letter for letter in question.letters])
    rated = likelihoods(opened, pairs, batch_size)
    logs = tuple(likelihood.log for likelihood in rated)
    return Choice(question.letters[logs.index(max(logs))], logs=logs)


def extract(text: str, question: Question) -> str:
    """Return the letter in an answer, "" if none: `The answer is B`, `(B)`, `B.`, `B` alone, or the option's text."""
    letters = question.letters
    patterns = (
        rf"(?i:\banswer\b(?:\s+is)?)[\s:=(*_`\"]*([{letters}])(?![A-Za-z'])",
        rf"^\W*([{letters}])(?=\W*$|[).:,\n])",
        rf"\(([{letters}])\)",
        rf"(?<![A-Za-z'])([{letters}])(?=[).:])",
    )
    for pattern in patterns:
        if match := re.search(pattern, text.strip()):
            return match[1]
    said = text.strip().rstrip(".!").casefold()
    named = [
        letter
        for letter, option in zip(letters, question.options, strict=True)
        if said == option.strip().rstrip(".!").casefold()
    ]
    return named[0] if len(named) == 1 else ""
