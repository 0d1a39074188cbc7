"""Rows of training data as text: the tokenizer's template applied, and the answers located in its output.

In: the turns of a row and a tokenizer. Out: `RowText`. Refused: a template in which an answer cannot be found, or that
rejects the turns (`AnswerNotFound`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, cast

from ktc.model.hf.token_borders import Stretch, shared_length
from ktc.training.tune.examples import Turn
from ktc.training.tune.settings import Template

CHAT: Final = frozenset({"system", "user", "assistant", "tool"})
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\b")


class AnswerNotFound(Exception):
    """An answer cannot be located in the template's output, or the template refuses the turns."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Characters to learn, from `start` to before `end`. `prompt` is the text that a model gets before it answers."""

    start: int
    end: int
    prompt: str


@dataclass(frozen=True, slots=True)
class RowText:
    """`answers` None: everything is learned. `special`: the tokenizer adds its special tokens; a template wrote them.

    `marked`: the answers are the template's marks, and not the text after a prompt.
    """

    text: str
    answers: tuple[Answer, ...] | None
    special: bool = False
    marked: bool = False


class RowWriter:
    """Writes rows by the tokenizer's chat template or, if it has none or the template is `plain`, without."""

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.uses_template = self.has_template and template == "auto"
        self._marks = self.uses_template and bool(_GENERATION.search(tokenizer.get_chat_template()))
        self._end = str(tokenizer.eos_token or "")

    def write(self, turns: tuple[Turn, ...], everything: bool) -> RowText:
        """Return the text of one row; `everything` learns the questions too. Raises AnswerNotFound."""
        from jinja2 import TemplateError

        if not (self.uses_template and turns[0].role in CHAT):
            return self._joined(turns, everything or turns[0].role == "text")
        try:
            if everything:
                return RowText(self._template(turns), None)
            return self._marked(turns) if self._marks else self._rendered(turns)
        except TemplateError as error:  # a template refuses unknown roles
            raise AnswerNotFound(f"the chat template refuses these turns: {error}") from error

    def _marked(self, turns: tuple[Turn, ...]) -> RowText:
        """Return the text with the stretches that the template marks as the assistant's.

        transformers' own mask of tokens ends an answer within its last character if that has several tokens, and ends
        nowhere if it has none.
        """
        from transformers.utils import chat_template_utils

        texts, marks = cast("Any", chat_template_utils).render_jinja_template(
            conversations=[_messages(turns)],
            chat_template=self._tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        text, stretches = cast("str", texts[0]), cast("list[Stretch]", marks[0])
        answers = tuple(Answer(start, end, text[:start]) for start, end in stretches if start < end)
        return RowText(text, answers, marked=True)

    def _rendered(self, turns: tuple[Turn, ...]) -> RowText:
        text = self._template(turns)
        places = (number for number, turn in enumerate(turns) if turn.is_answer)
        return RowText(text, tuple(self._answer(text, turns, place) for place in places))

    def _answer(self, text: str, turns: tuple[Turn, ...], place: int) -> Answer:
        """Return the answer from the end of the generation prompt to the end of its turn.

        A template may write the generation prompt otherwise than a turn (with an empty thought); the answer begins
        where they differ. It may format the last answer differently from earlier ones (with an empty thought before
        it), so the end of an earlier one is searched after its content.
        """
        prompt = self._template(turns[:place], prompt=True)
        until = self._template(turns[: place + 1])
        start = shared_length(prompt, text)
        if start < len(prompt) and not text.startswith(self._template(turns[:place])):
            message = f"the template writes the turns before turn {place + 1} differently once it is answered"
            raise AnswerNotFound(message)
        if text.startswith(until):
            return Answer(start, len(until), prompt)
        content = turns[place].content.strip()
        tail = until[until.rindex(content) + len(content) :] if content in until else ""
        content_start = text.find(content + tail, start)
        if content_start < 0:
            raise AnswerNotFound(f"the answer in turn {place + 1} is not found in the output of the template")
        return Answer(start, content_start + len(content) + len(tail), prompt)

    def _template(self, turns: tuple[Turn, ...], prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(_messages(turns), tokenize=False, add_generation_prompt=prompt)

    def _joined(self, turns: tuple[Turn, ...], everything: bool) -> RowText:
        """Join turns without a template: questions end with a line break, answers with the end-of-text token."""
        text, answers = "", list[Answer]()
        for turn in turns:
            written = turn.content + ("" if turn.role == "prompt" else "\n")
            if turn.is_answer:
                written = turn.content.removesuffix(self._end) + self._end
                answers.append(Answer(len(text), len(text) + len(written), text))
            text += written
        return RowText(text, None if everything else tuple(answers), special=True)


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]
